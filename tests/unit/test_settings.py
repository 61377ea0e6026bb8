"""Settings: precedence and origin by a table, bounds by their documented words, and the errors of wrong values."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.engine.api.errors import ConfigError
from inferd.server.config.fields import format_bytes, format_duration, parse_bytes, parse_duration
from inferd.server.config.settings import SETTINGS, Settings, is_loopback


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for about in SETTINGS.values():
        monkeypatch.delenv(about.env, raising=False)
    monkeypatch.delenv("INFERD_CONFIG", raising=False)


_NAME = "a name of 1 to 256 printable characters, with no space at its ends, such as sql-v2"


def refusal(**flags: object) -> str:
    with pytest.raises(ConfigError) as raised:
        Settings.load(flags)
    return str(raised.value)


@pytest.mark.parametrize("given_in", list(itertools.product([False, True], repeat=3)))
def test_flag_wins_over_env_over_file_over_default(
    given_in: tuple[bool, bool, bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_flag, in_env, in_file = given_in
    config = tmp_path / "inferd.yaml"
    config.write_text("port: 3003\n" if in_file else "log-level: debug\n")
    if in_env:
        monkeypatch.setenv("INFERD_PORT", "2002")
    settings = Settings.load({"port": "1001"} if in_flag else {}, config)
    sources = [(in_flag, 1001, "flag --port"), (in_env, 2002, "env INFERD_PORT"), (in_file, 3003, f"file {config}")]
    expected = next(((port, origin) for there, port, origin in sources if there), (8000, "default"))
    assert (settings.port, settings.origin("port")) == expected


def test_every_default_is_accepted_back_as_a_flag() -> None:
    plain = Settings()
    for name, about in SETTINGS.items():
        if about.default:
            assert getattr(Settings.load({name: about.default}), name) == getattr(plain, name), name


@pytest.mark.parametrize("name", [name for name, about in SETTINGS.items() if about.choices])
def test_choices_are_exactly_what_is_accepted(name: str) -> None:
    for choice in SETTINGS[name].choices:
        Settings.load({name: choice})
    assert SETTINGS[name].rule in refusal(**{name: "another"})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"port": "70000"}, "port must be a whole number from 0 to 65535, but got '70000' (flag --port)"),
        ({"port": "http"}, "port must be a whole number from 0 to 65535, but got 'http' (flag --port)"),
        ({"port": True}, "port: must be a number, not yes or no, but got True (flag --port)"),
        ({"max_model_len": "1"}, "max_model_len must be a whole number of at least 2, or auto, but got '1'"),
        ({"kv_memory": "1KiB"}, "kv_memory must be a size of at least 1MiB, or auto, but got '1KiB'"),
        (
            {"kv_memory": "2G"},
            "kv_memory: must be a size such as 2GiB (powers of 1024), 512MB (powers of 1000) or 1048576 (bytes)",
        ),
        ({"block_size": "48"}, "block_size must be one of 16, 32, 64, 128, or auto, but got 48"),
        ({"shutdown_timeout_s": "nan"}, "shutdown_timeout_s must be a number from 0 to 3600, but got 'nan'"),
        ({"prefix_caching": "perhaps"}, "prefix_caching must be true or false, but got 'perhaps'"),
        (
            {"ttft_target": "200"},
            "ttft_target: must be a duration with its unit, such as 200ms, 2s or 1.5m, but got '200'",
        ),
        ({"tpot_target": "0s"}, "tpot_target must be a duration from 0.1ms to 3600s, or none, but got '0s'"),
        ({"e2e_target": "2d"}, "e2e_target: must be a duration with its unit"),
        ({"e2e_target": True}, "e2e_target: must be a number, not yes or no"),
        ({"root_path": "llm/"}, "root_path: must begin with / and must not end with /, such as /llm, but got 'llm/'"),
        ({"served_model_name": ["a", "a"]}, "served_model_name: must be different names"),
        ({"served_model_name": ["\udcff"]}, rf"served_model_name must be {_NAME}, but is '\udcff': give another one"),
        ({"served_model_name": ["a", ""]}, f"served_model_name must be {_NAME}, but is ''"),
        ({"served_model_name": "x" * 257}, f"served_model_name must be {_NAME}, but is '{'x' * 196}...: give"),
        ({"model": "/models/\udcff"}, f"served_model_name must be {_NAME}"),
        ({"served_model_name": "a\tb"}, rf"served_model_name must be {_NAME}, but is 'a\tb'"),
        ({"lora": ["a\nb=dir"]}, f"lora: must have {_NAME}, but got"),
        ({"lora": ["x" * 2**20 + "=dir"]}, "x..."),
        ({"lora": ["=dir"]}, "lora: must be a name and a directory, such as sql=adapters/sql"),
        ({"host": " "}, "host: must not be empty"),
        ({"kv_host": "1MiB"}, "kv_host must be 0 (none) or at least 64MiB, but is 1MiB: give a larger one"),
        ({"kv_host": "1GiB", "prefix_caching": "false"}, "leave out --no-prefix-caching, or --kv-host"),
        ({"kv_host": "1GiB", "tensor_parallel_size": "2"}, "leave out --tensor-parallel-size, or --kv-host"),
        ({"kv_dir": ""}, "kv_dir must be the path of a directory, but is empty: give one, or leave it out"),
        ({"kv_dir": "kv", "prefix_caching": "false"}, "leave out --no-prefix-caching, or --kv-dir"),
    ],
)
def test_a_refusal_says_rule_value_and_origin(flags: dict[str, object], message: str) -> None:
    assert message in refusal(**flags)


def test_a_file_may_have_spaces_in_its_name() -> None:
    assert Settings.load({"model": "/models/my model.gguf"}).served_names == ("my model",)


def test_every_problem_is_said_at_once() -> None:
    assert refusal(port="-1", dtype="int3").count("but got") == 2


def test_other_machines_need_a_key_or_a_word() -> None:
    assert "--allow-unauthenticated" in refusal(host="0.0.0.0")
    assert Settings.load({"host": "0.0.0.0", "api_key": ["k"]}).api_key
    assert Settings.load({"host": "0.0.0.0", "allow_unauthenticated": "true"}).allow_unauthenticated


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.8.9.1", True), ("::1", True), ("[::1]", True), ("localhost", True), ("0.0.0.0", False),
     ("::", False), ("10.0.0.1", False), ("localhost.example.com", False), ("::ffff:10.0.0.1", False)],
)  # fmt: skip
def test_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_keys_come_from_any_source_and_are_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERD_API_KEY", "canary-1, canary-2")
    settings = Settings.load({})
    assert [key.get_secret_value() for key in settings.api_key] == ["canary-1", "canary-2"]
    monkeypatch.setenv("INFERD_API_KEY", "canary-1, canary 2")
    with pytest.raises(ConfigError) as raised:
        Settings.load({})
    assert not any("canary" in text for text in (repr(settings), f"{settings.explain()}", str(raised.value)))


@pytest.mark.parametrize("name", ["api_key", "admin_key"])
def test_an_empty_key_is_called_empty(name: str) -> None:
    assert f"{name}: a key is empty; leave the setting out" in refusal(**{name: ("",)})
    both = refusal(**{name: ("canary", "ca nary")})
    assert f"{name}: a key must consist of printable ASCII" in both and "nary" not in both


def test_file_keys_are_checked_by_name(tmp_path: Path) -> None:
    config = tmp_path / "inferd.yaml"
    for text, message in [
        ("max_num_seq: 4\n", "line 1: there is no setting 'max_num_seq'; did you mean max_num_seqs?"),
        ("port: 1\nport: 2\n", "line 2: port is already set on line 1"),
        ("- port\n", "must be a mapping"),
        ("port: [1\n", "is not valid YAML at line 2"),
        ("api_key: !!python/object/apply:os.getcwd []\n", "is not valid YAML"),
    ]:
        config.write_text(text)
        with pytest.raises(ConfigError, match=r"cannot read|must be|is no|is already|there is no") as raised:
            Settings.load({}, config)
        assert message in str(raised.value)
    with pytest.raises(ConfigError, match="cannot read the settings file"):
        Settings.load({}, tmp_path / "absent.yaml")


def test_file_values_have_their_yaml_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "inferd.yaml"
    config.write_text("port: 9\nprefix-caching: no\nserved_model_name: [a, b]\nkv_memory: 1GiB\nblock_size: 64\n")
    monkeypatch.setenv("INFERD_CONFIG", str(config))
    settings = Settings.load({})
    assert (settings.port, settings.prefix_caching, settings.served_model_name) == (9, False, ("a", "b"))
    assert (settings.kv_memory, settings.block_size) == (2**30, 64)


def test_unknown_variables_are_warned_of_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERD_PROT", "1")
    monkeypatch.setenv("INFERD_X", "1")
    assert Settings.load({}).warnings == (
        "INFERD_PROT is set, but inferd has no such setting; did you mean INFERD_PORT?",
        "INFERD_X is set, but inferd has no such setting",
    )


def test_a_kubernetes_service_link_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERD_PORT", "tcp://10.0.0.1:8000")
    assert "enableServiceLinks: false" in refusal()


def test_the_constructor_reads_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERD_PORT", "1")
    settings = Settings(host="::1")
    assert (settings.port, settings.origin("port"), settings.origin("host")) == (8000, "default", "code")


@pytest.mark.parametrize(
    ("model", "names"),
    [("tiny", "tiny"), ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"), ("/models/x/", "x"), ("./some/../y", "y")],
)
def test_a_local_path_is_served_under_its_last_part(model: str, names: str) -> None:
    assert Settings(model=model).served_names == (names,)
    assert Settings(model=model, served_model_name=("a", "b")).served_names == ("a", "b")


@given(st.integers(min_value=0, max_value=2**60))
def test_sizes_round_trip(num_bytes: int) -> None:
    assert parse_bytes(format_bytes(num_bytes)) == num_bytes


@pytest.mark.parametrize(("text", "num_bytes"), [("2GiB", 2**31), ("512MB", 512 * 10**6), ("1.5KiB", 1536), ("7", 7)])
def test_sizes(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "2G", "2gb", "-1", "1e9", "GiB", "2 Gi B", "٣MB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="must be a size"):
        parse_bytes(text)


def test_a_key_is_a_clients_or_an_admins_and_never_both() -> None:
    assert Settings.load({"api_key": ("a",), "admin_key": ("b",)}).admin_key[0].get_secret_value() == "b"
    with pytest.raises(ConfigError, match="given as --api-key and as --admin-key") as caught:
        Settings.load({"api_key": ("secret-a", "b"), "admin_key": ("secret-a",)})
    assert "secret-a" not in str(caught.value)
    with pytest.raises(ConfigError, match="printable ASCII"):
        Settings.load({"admin_key": ("a b",)})
    with pytest.raises(ConfigError, match="other machines can reach host"):
        Settings.load({"host": "0.0.0.0", "admin_key": ("b",)})
    shown = {name: value for name, value, _ in Settings.load({"admin_key": ("b", "c")}).explain()}
    assert shown["admin_key"] == "2 set"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("200ms", 0.2), (" 2 s ", 2.0), ("1.5m", 90.0), ("30us", 3e-5), ("0.25s", 0.25), ("none", None)],
)
def test_durations_and_their_shown_form(text: str, seconds: float | None) -> None:
    settings = Settings.load({"ttft_target": text} if seconds != 3e-5 else {"e2e_target": "1s"})
    if seconds != 3e-5:
        assert settings.ttft_target == seconds
        shown = {name: value for name, value, _ in settings.explain()}["ttft_target"]
        assert (parse_duration(shown) if shown != "none" else None) == seconds
    else:
        assert parse_duration(text) == seconds


@given(st.integers(1, 999_999))
def test_durations_are_shown_as_they_are_read(micros: int) -> None:
    assert parse_duration(format_duration(micros / 1e6)) == pytest.approx(micros / 1e6, rel=1e-5)

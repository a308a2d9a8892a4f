"""What is a secret by its name, its place or its form, and what only sounds like one."""

from __future__ import annotations

from typing import Any

import pytest

from rollover.engine.servers.sglang.config import SGLangConfig
from rollover.engine.servers.vllm.config import VLLMConfig
from rollover.privacy import HIDDEN, Redactor, is_secret, redacted, redacted_command, redacted_text
from rollover.run.building import EXPERIMENTS, build_config
from rollover.run.config import RunConfig
from rollover.run.sections import ModelConfig
from rollover.settings.plain import resolved

SECRETS = (
    "api_key", "HF_TOKEN", "token", "wandb-api-key", "password", "client_secret", "apiKey", "OPENAI_API_KEY", "auth",
    "x-auth-header", "Authorization", "Cookie", "session_cookie", "db_pass", "PGPASSWORD", "passwd", "credentials",
    "AWS_ACCESS_KEY_ID", "aws_secret_access_key", "access_tokens", "bearer", "privateKey", "sshkey", "GITHUB_TOKEN2",
    "params.login.password", "launch_env", "engine.launch_env.ANYTHING", "my_passphrase", "hftoken",
    "tokens", "keys", "signing_keys", "pw", "db_pw", "jwt", "jwts", "sas", "sas_url", "sig", "signature", "otp", "session",
    "session_id_token", "dsn", "SENTRY_DSN", "connection_string", "conn_str", "webhook", "slack_webhook_url", "github_pat",
    "creds", "db_cred", "psk", "hmac", "passkey", "app_key", "shared_key", "mnemonic", "seed_phrase", "seedPhrase", "recovery_code", "recovery_codes",
    "backup-codes", "recovery_phrase", "passphrase", "pin", "user_pin", "pin_code", "PINCODE", "PIN_NUMBER", "wallet_seed",
    "sessionid", "session_id", "csrf", "xsrf_cookie", "private_pem", "id_rsa", "mfa",
)  # fmt: skip
HARMLESS = (
    "max_new_tokens", "tokenizer", "stop_token_ids", "kv_cache_bytes", "monkey", "eos_token", "token_budget",
    "num_key_value_heads", "pass_score", "pass@1", "first_token_timeout_s", "tokens_per_round", "bypass", "compass",
    "author", "sort_key", "sort_keys", "max_sessions", "session_timeout_s", "max_tokens", "turkey", "passage", "stream_interval_tokens", "keep_last", "k", "secretary",
    "tls_key", "pin_memory", "seed", "seeds", "data_seed", "spin", "pinned", "recovery_timeout_s", "status_code", "code",
    "backup_dir", "opinion",
)  # fmt: skip


@pytest.mark.parametrize("name", SECRETS)
def test_a_value_is_hidden_by_its_name_wherever_it_stands(name: str) -> None:
    assert is_secret(name)
    assert redacted({"a": [{name: "s3cret"}]}) == {"a": [{name: HIDDEN}]}
    assert redacted({name: {"inner": ["s3cret", 12345]}}) == {name: {"inner": [HIDDEN, HIDDEN]}}
    for text in (f"--{name}=s3cret", f'{{{name} = "s3cret"}}', f'["--{name}", "s3cret"]', f'{{"{name}": "s3cret"}}'):
        assert "s3cret" not in redacted_text(text)
        assert "s3cret" not in redacted_command(["rollover", text, f"--{name}", "s3cret", "-x"])


@pytest.mark.parametrize("name", HARMLESS)
def test_what_only_sounds_like_a_secret_stays(name: str) -> None:
    assert redacted({name: "plain"}) == {name: "plain"}
    assert redacted_text(f"--{name}=plain") == f"--{name}=plain"


def test_a_secret_that_is_not_set_is_shown_as_that() -> None:
    unset = {"token": None, "api_key": "", "password": False, "cookies": []}
    assert redacted(unset) == unset


def test_a_whole_config_stays_readable() -> None:
    configs = [RunConfig(model=ModelConfig(path="Qwen/Qwen3-0.6B"))]
    configs += [build_config(file) for file in EXPERIMENTS.glob("*.toml")]
    engines = [VLLMConfig(urls=("http://10.0.0.5:8000",), api_key_env="MY_KEY"), SGLangConfig(launch=True)]
    for config in [*map(resolved, configs), *map(resolved, engines)]:
        assert redacted(config) == config


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://me:pw@host:1/x", f"http://{HIDDEN}@host:1/x"),
        ("http://me:p@ss@host:1/x", f"http://{HIDDEN}@host:1/x"),
        ("http://me:p/ss@host/x", f"http://{HIDDEN}@host/x"),
        ("https://host/x?key=s3cret&b=1 is down", f"https://host/x?{HIDDEN} is down"),
        ("https://host/x#access_token=s3cret", f"https://host/x#{HIDDEN}"),
        ("https://host/x#a-heading", "https://host/x#a-heading"),
        ("got Authorization: Bearer s3cret s3cret", f"got Authorization: {HIDDEN}"),
        ("X-Api-Key: s3cret", f"X-Api-Key: {HIDDEN}"),
        ("bearer s3cret-s3cret is refused", f"bearer {HIDDEN} is refused"),
        ("key hf_abcdefghijklmnopqrstuvwx", f"key {HIDDEN}"),
        ("key sk_live_abcdefghijklmnop", f"key {HIDDEN}"),
        ("key=sk-aB3dE6gH9jK2mN5pQ8sT", f"key={HIDDEN}"),
        ("keysk-aB3dE6gH9jK2mN5pQ8sT", f"key{HIDDEN}"),
        ("xsk-proj-aB3dE6gH9jK2mN5pQ8sT-x_y", f"x{HIDDEN}"),
        ("xsk-ant-api03-aB3dE6gH9jK2mN5pQ8sT-x_y", f"x{HIDDEN}"),
        ("tokenhf_aB3dE6gH9jK2mN5pQ8sT", f"token{HIDDEN}"),
        ("task-some-long-name-of-it and disk-9f86d081884c7d659a2feaa0", "task-some-long-name-of-it and disk-9f86d081884c7d659a2feaa0"),
        ("key gsk_abcdefghijklmnopqrst", f"key {HIDDEN}"),
        ("to https://hooks.slack.com/services/T00000000/B0000/XXXX1234", f"to https://hooks.slack.com/services/{HIDDEN}"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMII=\n-----END RSA PRIVATE KEY-----", f"-----BEGIN RSA PRIVATE KEY-----{HIDDEN}-----END RSA PRIVATE KEY-----"),
        ("postgres://me:pw@host/db", f"postgres://{HIDDEN}@host/db"),
        ('engine.launch_args = ["--api-key", "s3cret", "--tp", "2"]', f'engine.launch_args = ["--api-key", "{HIDDEN}", "--tp", "2"]'),
        ("run.toml:3: logging.api_key: expected a string", "run.toml:3: logging.api_key: expected a string"),
        ("rollout.max_new_tokens (60) and tokens = 7", "rollout.max_new_tokens (60) and tokens = 7"),
    ],
)  # fmt: skip
def test_secrets_in_a_text_are_known_by_their_form(text: str, shown: str) -> None:
    assert redacted_text(text) == shown


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["--api-key", "a", "b", "--tp", "2"], ["--api-key", HIDDEN, HIDDEN, "--tp", "2"]),
        (["--api-key", "-a", "--tp"], ["--api-key", HIDDEN, "--tp"]),
        (["-H", "Authorization: Bearer a"], ["-H", f"Authorization: {HIDDEN}"]),
        (["env", "HF_TOKEN=a", "vllm"], ["env", f"HF_TOKEN={HIDDEN}", "vllm"]),
        (["--engine", "{a = {api_key = {x = {y = 'a'}, z = 'b'}}}"], ["--engine", f'{{"a": {{"api_key": {{"x": {{"y": "{HIDDEN}"}}, "z": "{HIDDEN}"}}}}}}']),
        (["--engine={urls = ['b'], launch_env = {A = 'a'}}"], [f'--engine={{"urls": ["b"], "launch_env": {{"A": "{HIDDEN}"}}}}']),
        (["--rollout.stop_strings", "['a']"], ["--rollout.stop_strings", "['a']"]),
    ],
)  # fmt: skip
def test_arguments_lose_what_follows_a_secret_flag(arguments: list[str], shown: list[str]) -> None:
    assert redacted(arguments) == shown


@pytest.mark.parametrize("variable", ["ENGINE_KEY", "K8S_KEY", "_KEY", "engine_key", "OpenaiKey", "my_key2", "A" * 64])
def test_the_name_of_a_variable_is_shown_wherever_it_stands(variable: str) -> None:
    arguments = ["--engine.api_key_env", variable, f"--engine.api-key-env={variable}", "--api-key-env", variable]
    assert redacted(arguments) == arguments
    for name in ("api_key_env", "api-key-env", "engine.api_key_env", "apiKeyEnv", "HF_TOKEN_ENV"):
        assert redacted({name: variable}) == {name: variable}
        assert redacted_text(f'{name} = "{variable}"') == f'{name} = "{variable}"'
    assert Redactor(arguments).value({"api_key_env": variable}) == {"api_key_env": variable}


KEYS = ("s3cr3t", "a1b2c3", "c4nary-9f8e", "A" * 65, "a" * 65, "9F8E7D", "hf_" + "a" * 30, "AKIA" + "A" * 16, "a b")


@pytest.mark.parametrize("key", [*KEYS, "ghp_" + "B" * 36])
def test_a_value_that_is_no_name_of_a_variable_is_hidden_in_its_place(key: str) -> None:
    assert redacted({"api_key_env": key}) == {"api_key_env": HIDDEN}
    assert redacted(["--api-key-env", key]) == ["--api-key-env", HIDDEN]
    assert key not in redacted_text(f'api_key_env = "{key}"')


def test_all_variables_of_a_servers_environment_are_hidden() -> None:
    for name in ("launch_env", "engine.launch_env", "engine.launch_env.MY_KEY_ENV"):
        assert redacted({name: "TOP_SECRET"}) == {name: HIDDEN}


@pytest.mark.parametrize("known", [{"launch_env": {"X": 'top"s3cret'}}, ["--token", 'top"s3cret']])
def test_a_secret_once_met_is_known_again_without_its_name(known: Any) -> None:
    redactor = Redactor(known)
    assert redactor.text('refused top"s3cret') == f"refused {HIDDEN}"
    assert redactor.text(r'refused "top\"s3cret"') == f'refused "{HIDDEN}"'
    assert redactor.value({"message": 'top"s3cret'}) == {"message": HIDDEN}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("my password: zzz and api_key=abc", f"my password: {HIDDEN} and api_key={HIDDEN}"),
        ("API key: abc, params.db.password = x", f"API key: {HIDDEN}, params.db.password = {HIDDEN}"),
        ('if password == "zzz": ...', f'if password == "{HIDDEN}": ...'),
        ('{"meta": {"client_secret": "zzz", "n": 1}}', f'{{"meta": {{"client_secret": "{HIDDEN}", "n": 1}}}}'),
        ("key hf_abcdefghijklmnopqrstuvwx at http://me:pw@host", f"key {HIDDEN} at http://{HIDDEN}@host"),
        *((same, same) for same in (
            "sorted(words, key=len); token = tokens[i]; key = 5", "The answer key: B. Secret: 42, pin = 1234",
            "def login(name: str, password: str) -> bool", "To reset a password:\n1. Click", "each cookie: 3 dollars",
        )),
    ],
)  # fmt: skip
def test_in_prose_only_names_that_mean_nothing_else_hide_a_word(text: str, shown: str) -> None:
    redactor = Redactor(prose=True)
    assert redactor.text(text) == shown
    assert redactor.value({"meta": [{"token": "zzz", "text": text}]}) == {"meta": [{"token": HIDDEN, "text": shown}]}


@pytest.mark.parametrize(
    "text", ['{"meta": {"password": "zzz"}}', '"{\\"password\\": \\"zzz\\"}"', "a = {password = 'zzz'}"]
)
def test_a_secret_inside_another_value_is_hidden(text: str) -> None:
    assert "zzz" not in redacted_text(text) and HIDDEN in redacted_text(text)


def test_short_values_are_not_looked_for_in_other_texts() -> None:
    assert Redactor({"launch_env": {"DEV": "1"}}).text("step 1 of 10") == "step 1 of 10"

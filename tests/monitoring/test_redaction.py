"""What a record tells of a command line."""

from pathlib import Path

import pytest

from gradguard.monitoring.record.redaction import redacted, redacted_arguments

JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl"


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (["--api-key", "abc"], ["--api-key", "***"]),
        (["--api_key=abc"], ["--api_key=***"]),
        (["--apikey", "abc"], ["--apikey", "***"]),
        (["--hf-token", "abc"], ["--hf-token", "***"]),
        (["--token", "-abc"], ["--token", "***"]),
        (["--token", "--verbose"], ["--token", "--verbose"]),
        (["--password=two words"], ["--password=***"]),
        (["--db.password", "x", "y"], ["--db.password", "***", "y"]),
        (["--aws-secret-access-key", "abc"], ["--aws-secret-access-key", "***"]),
        (["--client-secret", "abc"], ["--client-secret", "***"]),
        (["-pwd", "abc"], ["-pwd", "***"]),
        (["WANDB_API_KEY=abc"], ["WANDB_API_KEY=***"]),
        (["+logger.wandb.key=abc"], ["+logger.wandb.key=***"]),
        (["--PASSWORD", "abc"], ["--PASSWORD", "***"]),
        (['{"api_key": "a b", "lr": 0.1}'], ['{"api_key": ***, "lr": 0.1}']),
        (["{token: abc, lr: 1}"], ["{token: ***, lr: 1}"]),
        (["https://host/?token=abc&x=1"], ["https://host/?token=***&x=1"]),
        (["postgres://u:pw@host/db"], ["postgres://u:***@host/db"]),
        (["--url=redis://:p@ss@host:6379"], ["--url=redis://:***@host:6379"]),
        (["https://0123456789abcdef@sentry.io/1"], ["https://***@sentry.io/1"]),
        (["https://me@host/x"], ["https://me@host/x"]),
        (["Authorization: Bearer abcdefgh1234"], ["Authorization: Bearer ***"]),
        (["sk-proj-0123456789abcdefghij"], ["***"]),
        (["--x=hf_0123456789abcdefghij"], ["--x=***"]),
        (["ghp_0123456789abcdefghij0123456789abcdef"], ["***"]),
        (["AKIAIOSFODNN7EXAMPLE"], ["***"]),
        ([JWT], ["***"]),
        *(
            (arguments, arguments)
            for arguments in (
                ["--lr", "0.1", "--tokenizer=gpt2", "--max-tokens", "512"],
                ["--keyboard", "qwerty", "--monkey", "x", "--author", "me"],
                ["--task-arithmetic", "data.x=1", "a=b", ""],
            )
        ),
        ([Path("train.py"), 3], ["train.py", "3"]),
    ],
)  # fmt: skip
def test_secrets_are_hidden_and_nothing_else(given, shown):
    assert redacted_arguments(given) == shown


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("{here}/data/train.bin", "data/train.bin"),
        ("--data={here}/data", "--data=data"),
        ("--data={here}", "--data=."),
        ("{here}/", "."),
        ("{home}/models/x.pt", "~/models/x.pt"),
        ("[{home}/a,{here}/b]", "[~/a,b]"),
        ("{home}", "~"),
        ("{home}-2/x", "{home}-2/x"),
        ("/mnt{home}/x", "/mnt{home}/x"),
        ("/data/imagenet", "/data/imagenet"),
        ("file://{home}/x", "file://~/x"),
    ],
)
def test_paths_are_seen_from_the_working_folder_or_the_home(tmp_path, monkeypatch, given, shown):
    home, here = tmp_path / "home" / "me", tmp_path / "home" / "me" / "project"
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(Path, "home", lambda: home)
    names = {"home": home, "here": here}
    assert redacted(given.format(**names)) == shown.format(**names)


@pytest.mark.parametrize("part", ["a", "a.", "a-", "key", "key=", "eyJ-", "://", "a:", "sk-", "@"])
def test_a_long_argument_takes_no_long_time(part):
    assert len(redacted_arguments([part * (120_000 // len(part))])) == 1


def test_a_root_is_no_folder_to_be_seen_from(monkeypatch):
    monkeypatch.chdir("/")
    monkeypatch.setattr(Path, "home", lambda: Path("/"))
    assert redacted("/etc/passwd --root=/") == "/etc/passwd --root=/"

"""The command line: every setting is a flag, a flag is a variable, and what is no setting is refused by name."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from services.launcher import hints
from services.launcher.settings import SERVICES, LauncherSettings, parse, settings_fields
from tools.env_example import PATH, render

ROOT = Path(__file__).parent.parent.parent


def launcher(*argv: str, **env: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "services.launcher", *argv],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", **env},
        timeout=60,
        check=False,
    )


def test_a_call_without_a_command_serves() -> None:
    args, variables = parse(["--port", "8123", "--dtype=float32", "--disable-overlap"])
    assert args.command == "serve"
    assert variables == {
        "MILLRACE_PORT": "8123",
        "MILLRACE_DTYPE": "float32",
        "MILLRACE_DISABLE_OVERLAP": "true",
    }
    assert parse([])[0].command == "serve"
    assert parse(["serve"])[1] == {}


@pytest.mark.parametrize(
    ("flag", "variable"),
    [
        ("--tp", "MILLRACE_TENSOR_PARALLEL_SIZE"),
        ("--tensor-parallel-size", "MILLRACE_TENSOR_PARALLEL_SIZE"),
        ("--api-key", "MILLRACE_API_KEYS"),
        ("--api-keys", "MILLRACE_API_KEYS"),
    ],
)
def test_names_that_people_know_from_elsewhere(flag: str, variable: str) -> None:
    assert parse([flag, "2"])[1] == {variable: "2"}


PROMISED = [
    "model",
    "model-source",
    "served-model-name",
    "host",
    "port",
    "device",
    "dtype",
    "load-format",
    "tensor-parallel-size",
    "apis",
    "api-workers",
    "tokenizers",
    "detokenizers",
    "schedulers",
    "redis-url",
    "redis-prefix",
    "page-size",
    "num-pages",
    "memory-ratio",
    "max-running-requests",
    "max-seq-len",
    "max-prefill-tokens",
    "max-queued-requests",
    "max-queued-tokens",
    "cache",
    "attention-backend",
    "moe-backend",
    "cuda-graph-max-bs",
    "disable-overlap",
    "disable-custom-all-reduce",
    "engine",
    "lease",
    "drain-timeout",
    "api-keys",
    "cors-origins",
    "tool-call-parser",
    "reasoning-parser",
    "log-format",
    "log-level",
]


@pytest.mark.parametrize("flag", PROMISED)
def test_promised_flags_are_there(flag: str) -> None:
    assert flag.replace("-", "_") in settings_fields()


@pytest.mark.parametrize("argv", [["--nonsense", "3"], ["sell"], ["serve", "--no-such-flag", "x"], ["--por", "1"]])
def test_what_is_not_there_is_refused_by_name(argv: list[str]) -> None:
    done = launcher(*argv)
    assert done.returncode == 2
    assert argv[-2 if len(argv) > 1 else 0] in done.stderr


@pytest.mark.parametrize(
    ("argv", "env", "word"),
    [
        (["--dtype", "float31"], {}, "MILLRACE_DTYPE"),
        (["--reasoning-parser", "x"], {}, "MILLRACE_REASONING_PARSER"),
        (["--apis", "65"], {}, "MILLRACE_APIS"),
        ([], {"MILLRACE_PORT": "99999"}, "MILLRACE_PORT"),
        ([], {"MILLRACE_REDIS_URL": "http://x"}, "MILLRACE_REDIS_URL"),
        (["--model", "/no/such/folder"], {}, "MILLRACE_MODEL"),
    ],
)
def test_a_bad_value_stops_the_start_and_is_named(
    argv: list[str], env: dict[str, str], word: str, tmp_path: Path
) -> None:
    done = launcher("serve", "--run-dir", str(tmp_path), *argv, **env)
    assert done.returncode == 2
    assert word in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--dtype", "float17"], "--dtype (MILLRACE_DTYPE): 'float17': Input should be"),
        (["--tp=none"], "--tp (MILLRACE_TENSOR_PARALLEL_SIZE): 'none': Input should be"),
    ],
)
def test_a_bad_flag_is_named_as_it_was_typed(argv: list[str], words: str, tmp_path: Path) -> None:
    done = launcher("serve", "--run-dir", str(tmp_path), "--engine", "fake", *argv)
    assert done.returncode == 2
    assert words in done.stderr


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (
            "tensor_parallel_size 7 does not divide 9 heads; it would by 3",
            "--tp (MILLRACE_TENSOR_PARALLEL_SIZE) 7 does",
        ),
        ("device 'cuda' was asked for", "--device (MILLRACE_DEVICE) 'cuda' was asked for"),
        ("MILLRACE_DEVICE: 'gpu': device 'gpu' is not", "--device (MILLRACE_DEVICE): 'gpu': device 'gpu' is not"),
        ("dtype 'float16' is not supported", "dtype 'float16' is not supported"),
        ("device memory is full", "device memory is full"),
    ],
)
def test_a_flag_that_a_service_refuses_is_named_as_it_was_typed(message: str, words: str) -> None:
    argv = ["--tp", "7", "--device=cuda"]
    named = hints.with_flags(f"the start failed: scheduler-0: {message}", parse(argv)[1], argv)
    assert named.startswith(f"the start failed: scheduler-0: {words}")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--scheduler", "2"], "did you mean --schedulers?"),
        (["--max_seq_len=7"], "did you mean --max-seq-len?"),
        (["shell", "--max-model-len", "4096"], "vLLM's --max-model-len is --max-seq-len here"),
        (["--enable-prefix-caching"], "it is always so"),
        (["dead", "--redis-ur=x", "list"], "did you mean --redis-url?"),
        (["--prot", "8000"], "did you mean --port?"),
        (["--bogus"], "unknown: --bogus\n"),
        (["bogus"], "unknown: bogus; the commands are serve, shell, warmup, dead\n"),
    ],
)
def test_what_may_be_meant_is_said(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(argv)
    said = capsys.readouterr().err
    assert words in said
    assert "--tensor-parallel-size" not in said, "the usage is one line"


def test_every_counterpart_of_vllm_is_a_flag() -> None:
    flags = {f"--{name.replace('_', '-')}" for name in settings_fields()}
    assert {ours.partition(" ")[0] for ours in hints._FROM_VLLM.values()} <= flags
    assert not hints._FROM_VLLM.keys() & flags


def test_variables_that_are_no_settings_are_told(tmp_path: Path) -> None:
    done = launcher("--port", "x", "--run-dir", str(tmp_path), MILLRACE_PROT="8000")
    assert "MILLRACE_PROT is not a setting, and is ignored; did you mean MILLRACE_PORT?" in done.stderr
    environ = ["MILLRACE_BOGUS", "MILLRACE_MAX_SEQ_LENN", "MILLRACE_PORT", "MILLRACE_VERSION", "PATH"]
    bogus, warning = hints.of_variables(environ, settings_fields())
    assert bogus == "MILLRACE_BOGUS is not a setting, and is ignored"
    assert warning == "MILLRACE_MAX_SEQ_LENN is not a setting, and is ignored; did you mean MILLRACE_MAX_SEQ_LEN?"


def test_every_flag_has_a_help_text_or_explains_itself() -> None:
    silent = {name for name, flag in settings_fields().items() if not flag.text}
    assert silent <= {"redis_username", "log_level", "redis_sentinel_username"}


def test_the_example_of_the_environment_is_what_the_settings_say() -> None:
    assert PATH.read_text(encoding="utf-8") == render(), "run `make env-example`"
    named = set(re.findall(r"^#?MILLRACE_(\w+)=", PATH.read_text(encoding="utf-8"), re.MULTILINE))
    classes = (LauncherSettings, *SERVICES.values())
    assert named == {name.upper() for cls in classes for name in cls.model_fields}


def test_warmup_takes_the_flags_of_the_scheduler() -> None:
    args, variables = parse(["warmup", "--model", "x/y", "--cache-dir", "/c", "--tp", "2", "--cuda-graph-max-bs=64"])
    assert args.command == "warmup"
    assert variables == {
        "MILLRACE_MODEL": "x/y",
        "MILLRACE_KERNEL_CACHE_DIR": "/c",
        "MILLRACE_TENSOR_PARALLEL_SIZE": "2",
        "MILLRACE_CUDA_GRAPH_MAX_BS": "64",
    }


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["--device", "cpu"], 2, "--device (MILLRACE_DEVICE): kernels are compiled for GPUs"),
        (["--engine", "fake"], 2, "--engine (MILLRACE_ENGINE): the fake engine has no kernels"),
        (["--cuda-graph-max-bs", "-1"], 2, "--cuda-graph-max-bs (MILLRACE_CUDA_GRAPH_MAX_BS)"),
        (["--cache-dir", "/dev/null/x"], 1, "torch sees none here"),
        (["--cash-dir", "/tmp"], 2, "did you mean --cache-dir?"),
    ],
)
def test_warmup_says_why_it_compiles_nothing(flags: list[str], code: int, words: str) -> None:
    found = launcher("warmup", *flags, CUDA_VISIBLE_DEVICES="")
    assert found.returncode == code and words in found.stderr, found.stderr

"""Every option of every command: the values that it refuses, and where it has an effect.

An option or a command that the tables here do not have fails a test. Reports of other commands:
https://github.com/gem/oq-engine/pull/5527 accepted a negative number of cores,
https://github.com/MobileNativeFoundation/bluepill/issues/437 numbers that are none, and
https://github.com/automl/SMAC3/issues/58 one that is infinite as a float;
https://github.com/StefanMaron/BusinessCentral.AL.Runner/pull/3387 lost a run to a mistyped folder;
https://github.com/alexflint/go-arg/issues/246 has the status of bad usage, 2.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import front_door
import pytest

import _ringcomm_cli
from _ringcomm_cli import EXIT_BAD_INPUT


def around(least: int, most: int | None = None) -> list[str]:
    """What a whole number between the two may not be."""
    beyond = [str(least - 1), *([] if most is None else [str(most + 1)])]
    return [*beyond, "two", "1.5", "1e3", "nan", ""]


# By option a value that is right and those that are wrong; {file}, {new} and {folder} are paths.
NEW = ("{new}", ["{folder}/none/file", "{folder}", "/proc/file"])
NEW_FOLDER = ("{new}", ["{folder}/none/folder", "{file}"])
OLD = ("{file}", ["{folder}/none", "{folder}"])
SECONDS = ("0", ["nan", "inf", "-1", "1e999", "soon", ""])
COUNT = ("3", around(1))
BYTES = ("4k", ["0", "-1", "many", "1.0001k", "nan", "9" * 400])
SIZES = ("1k,4m", ["0", "1k,-1", "many", "1k,0", ","])
ONE_OF = ["juggle", ""]
NAMES = [*ONE_OF, ","]
FLAG: tuple[str | None, list[str]] = (None, [])
VALUES: dict[str, tuple[str | None, list[str]]] = {
    **dict.fromkeys(("--html", "--plot"), NEW),
    **dict.fromkeys(("--tuning", "--timeline", "--nccl-library"), OLD),
    **dict.fromkeys(("--per-host", "--dp", "--pp", "--tp", "--ep", "--graph", "--width"), COUNT),
    **dict.fromkeys(("--layers", "--rows", "--gpus", "--why"), COUNT),
    **dict.fromkeys(("--verdict", "--collectives", "--sequence-parallel", "--force"), FLAG),
    **dict.fromkeys(("--mps", "--all"), FLAG),
    "--seconds": SECONDS,
    "--world-size": ("2", around(1, 64)),
    "--world-sizes": ("2,64", ["1,2", "2,65", "two", ","]),
    "--worlds": ("2,64", ["1,2", "2,65", "two", ","]),
    "--sizes": SIZES,
    "--repeats": ("0", around(0)),
    "--bytes": BYTES,
    "--memory": ("80GiB", ["80", "0", "-1", "many"]),
    "--sequence": ("128", ["-1", "many"]),
    "--model": ("gpt2", []),  # which the planner reads
    "--top": ("0", around(0)),
    "--hardware": ("l4", ONE_OF),
    "--systems": ("ddp,zero1", NAMES),
    "--schedules": ("1f1b,zbv", NAMES),
    "--checkpointing": ("none,full", NAMES),
    "--precision": ("fp32", ONE_OF),
    "--optimizer": ("sgd", ONE_OF),
    "--job": ("4194304", around(1, 1 << 22)),
    "--dump": NEW_FOLDER,
    "--format": ("torch", ONE_OF),
    "--ranks": ("4", around(2, 64)),
    "--micro-batches": ("8", around(1, 256)),
    "--events": ("64", around(64, 1 << 24)),
    "--seq": ("0", around(0)),
    "--merge": ("{folder}", ["{folder}/none"]),
    "--layout": ("one", ONE_OF),
    "--clock": ("host", ONE_OF),
    "--dtype": ("int32", NAMES),
    "--dtypes": ("bfloat16", NAMES),
    "--ops": ("barrier,broadcast", NAMES),
    "--vocabularies": ("8,9", ["0", "8,-1", "many", ","]),
    "--threads": ("3", ["0", "-1", "two"]),
    "--tokens": ("3", ["0", "-1", "many", "nan"]),
    "--over": ("gloo", [","]),
    "--device": ("cpu", []),  # which torch has to find
    "--peers": ("torch", [","]),
}
TRACE = {"--json": FLAG, "--steps": OLD}
# Where an option is another than elsewhere.
OTHERS: dict[str, dict[str, tuple[str | None, list[str]]]] = {
    "bench": {"--json": NEW, "--world-size": ("2", around(2, 64))},
    "doctor": {"--json": FLAG},
    "plan": {"--json": FLAG, "--tokens": BYTES},
    "show": {"--trace": OLD, "--output": NEW},
    "trace": TRACE | {"--output": NEW},
    "trace to torch": TRACE | {"--output": NEW_FOLDER},
    "tune": {"--json": NEW},
    "bench OP": {"--json": NEW},
    "bench systems": {"--json": NEW, "--systems": ("ddp blocking,ddp", [","])},
    "bench cores": {"--json": NEW, "--ops": ("broadcast", [*NAMES, "barrier"])},
}
PLAN = "model gpus tokens sequence top why json hardware tuning memory per-host dp pp tp ep systems"
PLAN += " schedules checkpointing precision optimizer sequence-parallel"
SWEEP = "seconds repeats device world-size peers sizes dtype json html"
GPUS = "layout mps nccl-library clock graph plot"
LOSS = "seconds repeats device world-size threads tokens vocabularies dtypes peers json"
# Of each form of a command: what follows the options, and those that have an effect.
FORMS: list[tuple[str, str, str]] = [
    ("bench", "", "world-size seconds html json"),
    ("doctor", "", "world-size seconds json"),
    ("doctor", "--job 4194304", "json verdict dump"),
    ("doctor", "--job 4194304 --dump {new}", "json verdict format"),
    ("doctor", "--job 4194304 --verdict", "dump"),
    ("plan", "--model gpt2 --gpus 8", PLAN),
    ("plan", "--model gpt2 --gpus 8 --json", PLAN.replace(" top why json", "")),
    ("plan", "--collectives", "tuning"),
    ("show", "ring", "ranks bytes trace output"),
    ("show", "ring --trace {file}", "seq output"),
    ("show", "memory", "model ranks output"),
    ("show", "lomo", "model output"),
    ("show", "pipeline", "ranks micro-batches timeline output"),
    ("show", "pipeline --timeline {file}", "output"),
    ("show", "tensor", "model ranks output"),
    ("show", "loss", "ranks output"),
    ("show", "trace --trace {file}", "output"),
    ("trace", "-- true", "output events html"),
    ("trace", "--merge {folder}", "output html format"),
    ("trace to torch", "--merge {folder} --format torch", "output"),
    ("trace", "--steps {file}", "seq json"),
    ("tune", "", "world-sizes sizes seconds repeats json force"),
    ("bench OP", "all_reduce", SWEEP),
    ("bench OP", "all_reduce --device cuda", f"{SWEEP} {GPUS}"),
    ("bench OP", "cross_entropy", LOSS),
    ("bench OP", "cross_entropy --device cuda", f"{LOSS} layout mps"),
    (
        "bench systems",
        "systems",
        "seconds repeats world-size systems over width layers rows tokens all plot html json",
    ),
    ("bench cores", "cores", "seconds repeats worlds threads ops sizes tuning json"),
]
# Options that begin another form.
MODES = {"--job", "--collectives", "--merge", "--steps", "--trace", "--timeline"}


def parser_of(command: str, rest: str) -> argparse.ArgumentParser:
    if command.startswith("bench "):
        return front_door.make_parser(rest.split(maxsplit=1)[0])
    parser = _ringcomm_cli.OneLineParser(prog="ringcomm")
    _ringcomm_cli._COMMANDS[command.split(maxsplit=1)[0]][0](parser)
    return parser


def options_of(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        long = [option for option in action.option_strings if option.startswith("--")]
        if long and long[0] != "--help":
            yield long[0]


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.json").write_text("{}", encoding="utf-8")
    return {
        "file": str(tmp_path / "a.json"),
        "new": str(tmp_path / "new"),
        "folder": str(tmp_path),
    }


@pytest.mark.parametrize(("command", "rest", "effective"), FORMS)
def test_each_option(
    command: str,
    rest: str,
    effective: str,
    paths: dict[str, str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It is accepted where it has an effect, and refused elsewhere and with a wrong value.

    All options are in front of a page, a program and an operation.
    """
    wanted = {f"--{name}" for name in effective.split()}
    values = VALUES | OTHERS[command]
    after = [word.format(**paths) for word in rest.split()]

    def words(option: str, value: str | None) -> list[str]:
        given = [option, *([] if value is None else [value.format(**paths)])]
        return [command.split(maxsplit=1)[0], *given, *after]

    def refused(argv: list[str]) -> str:
        with pytest.raises(SystemExit) as ended:
            _ringcomm_cli.read(argv)
        assert ended.value.code == EXIT_BAD_INPUT, argv
        error = capsys.readouterr().err
        assert error.count("\n") == 1, argv
        assert error.startswith(f"ringcomm {argv[0]}"), argv
        return error

    known = {*options_of(parser_of(command, rest))}
    assert wanted <= known
    for option in known:
        right, wrong = values[option]
        if option in wanted:
            _ringcomm_cli.read(words(option, right))
            for value in wrong:
                assert option in refused(words(option, value)), (option, value)
        elif option not in MODES and option not in after:
            assert option in refused(words(option, right)), option
    files = {path.name for path in Path(paths["folder"]).iterdir()}
    assert files == {"a.json"}  # a check leaves nothing


def test_the_forms_are_those_of_all_commands() -> None:
    assert {command.split()[0] for command, _, _ in FORMS} == {*_ringcomm_cli._COMMANDS}
    pages = {rest.split()[0] for command, rest, _ in FORMS if command == "show"}
    assert pages == {*_ringcomm_cli.PAGES}
    of_bench = {rest.split()[0] for command, rest, _ in FORMS if command.startswith("bench ")}
    assert of_bench - {"all_reduce"} == {*front_door.ALONE}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("plan --gpus 8", "arguments are required: --model"),
        ("plan", "arguments are required: --model, --gpus"),
        ("doctor --format torch", "--format needs --dump FOLDER"),
        ("doctor --job 7 --dump {new} --seconds 1", "--seconds has no effect with --job PID"),
        ("doctor --job 7 --json --verdict", "--json has no effect with --verdict"),
        ("trace -- true --merge x", None),
        ("trace --merge {folder} -- true", "give one of"),
        ("trace --merge {folder} --format torch --html {new}", "--format torch writes none"),
        ("trace --format torch -- true", "--format needs --merge FOLDER"),
        ("trace --merge {folder}/a --format torch -o {new}", None),  # as in RINGCOMM_FLIGHT_DUMP
        ("bench --html {new} --json {new}", "is given for two files"),
        ("show trace --trace {file} -o {file}", "is given for two files"),
        ("show trace --trace a.json -o {file}", "is given for two files"),
        ("trace --html ringcomm-trace.json -- true", "is given for two files"),
        ("trace --steps {file}", None),
        ("show loss --ranks 5", "5 ranks cannot share them"),
        ("show trace", "page trace needs --trace FILE"),
        ("tune --sizes 1k,1024", "at least 2 different sizes"),
        ("plan --model gpt2 --gpus 1 --hardware h10", "did you mean h100?"),
        ("plan --model gpt2 --gpus 1 --systems ddp,zero4", "did you mean zero3?"),
        ("bench --seconds 1 all_reducee", "did you mean all_reduce?"),
        ("bench --json barrier barrier", None),
        ("bench barrier --sizes 1k", "--sizes has no effect with op barrier"),
        ("bench --graph 3 all_reduce", "--graph has no effect with device cpu"),
        ("bench --ops barrier cores", "'barrier' is none of"),
        ("bench --ops broadcast cores", None),
        ("bench --mps all_reduce --device cuda", None),
    ],
)
def test_options_together(
    line: str, message: str | None, paths: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A message of None: it is right.

    https://github.com/dathere/qsv/issues/4580: the output replaced the input of the same name.
    https://github.com/VIDA-NYU/reprozip/issues/10: an option was right on one side of a word only.
    """
    argv = [word.format(**paths) for word in line.split()]
    if message is None:
        assert vars(_ringcomm_cli.read(argv))
        return
    with pytest.raises(SystemExit) as ended:
        _ringcomm_cli.read(argv)
    assert ended.value.code == EXIT_BAD_INPUT
    assert message in capsys.readouterr().err


def test_a_wheel_has_no_operations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_ringcomm_cli, "BENCHMARKS", tmp_path)
    for words in (["bench", "--help"], ["bench", "alreduce"], ["bench", "--seconds", "1", "cores"]):
        with pytest.raises(SystemExit):
            _ringcomm_cli.read(words)
    out, err = capsys.readouterr()
    assert "all_to_all" not in out
    first, second = err.splitlines()
    assert "an installed package has the short comparison only" in first
    assert "did you mean all_reduce?" in first
    assert "an installed package has the short comparison only" in second
    assert "did you mean" not in second


def test_names_of_the_plan_are_the_planners() -> None:
    """They are known before the planner is imported, which needs torch."""
    from ringcomm.planner import job

    assert tuple(job.SYSTEMS) == _ringcomm_cli.SYSTEMS
    assert job.SCHEDULES == _ringcomm_cli.SCHEDULES


def test_the_page_loss_has_its_classes() -> None:
    from ringcomm import show

    assert len(show.loss(4)["logits"]) == _ringcomm_cli.NUM_CLASSES
    assert json.dumps(show.loss(12))

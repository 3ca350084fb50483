"""The options of all commands, with values that are right and wrong, and where they have an effect.

Reports of other commands:
https://github.com/gem/oq-engine/pull/5527 accepted a negative number of cores,
https://github.com/MobileNativeFoundation/bluepill/issues/437 numbers that are none, and
https://github.com/automl/SMAC3/issues/58 one that is infinite as a float;
https://github.com/StefanMaron/BusinessCentral.AL.Runner/pull/3387 lost a run to a mistyped folder;
https://github.com/alexflint/go-arg/issues/246 has the status of bad usage, 2.
"""

from __future__ import annotations


def around(least: int, most: int | None = None) -> list[str]:
    """What a whole number between the two may not be."""
    beyond = [str(least - 1), *([] if most is None else [str(most + 1)])]
    return [*beyond, "two", "1.5", "1e3", "nan", ""]


# By option a value that is right and has an effect, and those that are wrong. {new} is a path, and
# {folder} and {file} are a folder and a file; what {trace} and the like are is in `files`.
NEW = ("{new}", ["{folder}/none/file", "{folder}", "/proc/file"])
PICTURE = ("{new}.svg", NEW[1])
NEW_FOLDER = ("{new}", ["{folder}/none/folder", "{file}"])
NO_FILES = ["{folder}/none", "{folder}"]
SECONDS = ("1", ["nan", "inf", "-1", "1e999", "soon", ""])
COUNT = ("2", around(1))
BYTES = ("4k", ["0", "-1", "many", "1.0001k", "nan", "9" * 400])
SIZES = ("1k,4k", ["0", "1k,-1", "many", "1k,0", ","])
ONE_OF = ["juggle", ""]
NAMES = [*ONE_OF, ","]
FLAG: tuple[str | None, list[str]] = (None, [])
VALUES: dict[str, tuple[str | None, list[str]]] = {
    **dict.fromkeys(("--html", "--json"), NEW),
    "--plot": PICTURE,
    "--tuning": ("{tuning}", NO_FILES),
    "--timeline": ("{timeline}", NO_FILES),
    "--nccl-library": ("{file}", NO_FILES),
    "--trace": ("{trace}", NO_FILES),
    **dict.fromkeys(("--per-host", "--dp", "--pp", "--tp", "--ep", "--graph", "--why"), COUNT),
    **dict.fromkeys(("--layers", "--rows", "--gpus"), COUNT),
    "--width": ("64", COUNT[1]),
    **dict.fromkeys(("--verdict", "--collectives", "--sequence-parallel", "--force"), FLAG),
    **dict.fromkeys(("--mps", "--all"), FLAG),
    "--seconds": SECONDS,
    "--world-size": ("3", around(1, 64)),
    "--world-sizes": ("2,64", ["1,2", "2,65", "two", ","]),
    "--worlds": ("2,64", ["1,2", "2,65", "two", ","]),
    "--sizes": SIZES,
    "--repeats": ("2", around(0)),
    "--bytes": BYTES,
    "--memory": ("20GiB", ["80", "0", "-1", "many"]),
    "--sequence": ("128", ["-1", "many"]),
    "--model": ("gpt2", []),  # which the planner reads
    "--top": ("0", around(0)),
    "--hardware": ("l4", ONE_OF),
    "--systems": ("ddp,zero1", NAMES),
    "--schedules": ("1f1b,zbv", NAMES),
    "--checkpointing": ("full", NAMES),
    "--precision": ("fp32", ONE_OF),
    "--optimizer": ("sgd", ONE_OF),
    "--job": ("{job}", around(1, 1 << 22)),
    "--dump": NEW_FOLDER,
    "--ranks": ("2", around(2, 64)),
    "--micro-batches": ("4", around(1, 256)),
    "--events": ("64", around(64, 1 << 24)),
    "--seq": ("1", around(0)),
    "--merge": ("{recordings}", ["{folder}/none"]),
    "--layout": ("one", ONE_OF),
    "--clock": ("host", ONE_OF),
    "--dtype": ("int32", NAMES),
    "--dtypes": ("bfloat16", NAMES),
    "--ops": ("barrier,broadcast", NAMES),
    "--vocabularies": ("8,9", ["0", "8,-1", "many", ","]),
    "--threads": ("3", ["0", "-1", "two"]),
    "--tokens": ("8", ["0", "-1", "many", "nan"]),
    "--over": ("gloo", [","]),
    "--device": ("cuda", []),  # which torch has to find
    "--peers": ("torch", [","]),
}
# Where an option is another than elsewhere.
OTHERS: dict[str, dict[str, tuple[str | None, list[str]]]] = {
    "bench": {"--world-size": ("3", around(2, 64))},
    "doctor": {"--json": FLAG},
    "plan": {"--json": FLAG, "--tokens": BYTES, "--model": ("llama-7b", [])},
    "show": {"--output": NEW},
    "trace": {"--json": FLAG, "--output": NEW},
    "trace to torch": {"--json": FLAG, "--output": NEW_FOLDER},
    "tune": {},
    "bench OP": {"--peers": ("triton", NAMES)},
    "bench collectives": {"--peers": ("gloo,gloo", [","])},
    "bench systems": {"--systems": ("ddp blocking,ddp", [","])},
    "bench cores": {"--ops": ("broadcast", [*NAMES, "barrier"])},
}
PLAN = "model gpus tokens sequence top why json hardware memory per-host dp pp tp ep systems"
PLAN += " schedules checkpointing precision optimizer sequence-parallel"
PLAN_OF = "--model gpt2 --gpus 8"
SWEEP = "seconds repeats device world-size peers sizes dtype json html"
GPUS = "layout mps nccl-library clock graph plot"
LOSS = "seconds repeats device world-size threads tokens vocabularies dtypes peers json"
QUICK = "--seconds 0 --repeats 0 --json a.jsonl"
SMALL_LOSS = f"cross_entropy --tokens 16 --vocabularies 64 --dtypes float32 --threads 1 {QUICK}"
SYSTEMS_OF = f"systems --systems ddp --width 32 --layers 1 --tokens 4 --world-size 1 {QUICK}"
PROGRAM = "sh -c 'echo $RINGCOMM_TRACE_EVENTS >events; cp -r {recordings}/. $RINGCOMM_TRACE'"
# Of each form of a command: what follows the options, and those that have an effect. Another form
# shows the effect of those before a bar.
FORMS: list[tuple[str, str, str]] = [
    ("bench", "--world-size 2 --seconds 0", "world-size seconds html json"),
    ("doctor", "--world-size 2 --seconds 0", "world-size seconds json"),
    ("doctor", "--job {job}", "job json verdict dump"),
    ("doctor", "--job {job} --dump {new}", "json verdict"),
    ("doctor", "--job {job} --verdict", "dump"),
    ("plan", PLAN_OF, f"tuning | {PLAN}"),
    ("plan", f"{PLAN_OF} --hardware cpu-core", f"{PLAN} | tuning"),
    ("plan", f"{PLAN_OF} --json", f"{PLAN.replace(' top why json', '')} tuning |"),
    ("plan", "--collectives", "tuning"),
    ("show", "ring", "ranks bytes trace output"),
    ("show", "ring --trace {trace}", "seq output trace"),
    ("show", "memory", "model ranks output"),
    ("show", "lomo", "model output"),
    ("show", "pipeline", "ranks micro-batches timeline output"),
    ("show", "pipeline --timeline {timeline}", "output"),
    ("show", "tensor", "model ranks output"),
    ("show", "loss", "ranks output"),
    ("show", "trace --trace {trace}", "output trace"),
    ("trace", f"-- {PROGRAM}", "output events html"),
    ("trace", "--merge {recordings}", "output html"),
    (
        "tune",
        "--world-sizes 2 --sizes 1k,2k --seconds 0 --repeats 0 --force",
        "world-sizes sizes seconds repeats json force",
    ),
    ("bench collectives", f"all_reduce --sizes 1k {QUICK}", SWEEP),
    ("bench collectives", f"all_reduce --sizes 1k --device cuda {QUICK}", f"{SWEEP} | {GPUS}"),
    ("bench OP", SMALL_LOSS, LOSS),
    ("bench OP", f"{SMALL_LOSS} --device cuda", f"{LOSS} | layout mps"),
    (
        "bench systems",
        SYSTEMS_OF,
        "seconds repeats world-size systems over width layers rows tokens tuning all plot"
        " html json",
    ),
    (
        "bench cores",
        f"cores --sizes 1k --ops all_reduce --threads 1 {QUICK}",
        "seconds repeats worlds threads ops sizes tuning json",
    ),
]
# Options that begin another form.
MODES = {"--job", "--collectives", "--merge", "--trace", "--timeline"}

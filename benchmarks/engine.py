"""The embedded engine against vLLM and transformers: same weights, same requests, same machine, one after another.

    python benchmarks/engine.py                 # all loads and contenders, about half an hour on a quiet machine
    python benchmarks/engine.py --small         # a minute, to see that it works
    python benchmarks/engine.py --loads fixed --contenders embedded,vllm-compiled

vLLM runs in its own environment (``--vllm-python``; ``make test-vllm`` makes it) and is left out where there is none.
Every contender uses the same number of threads (``--threads``) and returns the log-prob of each token, except
transformers, which has none to give. The result, with the machine, versions and spread, goes to ``results/``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from datetime import date
from pathlib import Path

from workload import Load, make_load

HERE = Path(__file__).parent
VLLM_PYTHON = HERE.parent / ".venv-vllm" / "bin" / "python"
CONTENDERS: dict[str, tuple[str, ...]] = {
    "embedded": ("embedded.py",),
    "embedded-server": ("embedded_server.py",),
    "embedded-torch": ("embedded.py", "--kernels", "torch"),
    "vllm-compiled": ("vllm_offline.py",),
    "vllm-compiled-in-process": ("vllm_offline.py", "--in-process"),
    "vllm-eager-in-process": ("vllm_offline.py", "--in-process", "--eager"),
    "transformers-static": ("transformers_static.py",),
    "transformers-continuous": ("transformers_continuous.py",),
}
ONCE = ("embedded-torch", "transformers-static", "transformers-continuous")
"""Too slow to repeat."""
Result = dict[str, object]


def machine() -> dict[str, object]:
    info = dict(
        line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines() if ":" in line
    )
    info = {key.strip(): value.strip() for key, value in info.items()}
    memory_kb = int(Path("/proc/meminfo").read_text().split()[1])
    return {
        "cpu": info.get("model name", platform.processor()),
        "num_cores": os.cpu_count(),
        "l3_cache": info.get("cache size"),
        "avx512": "avx512f" in info.get("flags", ""),
        "memory_gib": round(memory_kb / 2**20, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_average": os.getloadavg(),
    }


def environment(threads: int) -> dict[str, str]:
    path = os.pathsep.join([str(HERE), str(HERE.parent)])
    return os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}


def run(command: Iterable[object], threads: int, limit_s: float) -> Result:
    """The JSON object on the last line that the program prints."""
    argv, pipe = [str(part) for part in command], subprocess.PIPE
    with subprocess.Popen(
        argv, env=environment(threads), stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as program:
        try:
            out, err = program.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(program.pid, signal.SIGKILL)  # its own processes would disturb the next
            return {"error": f"not done after {limit_s:.0f} s"}
    if program.returncode:
        return {"error": (err or out).strip()[-2000:]}
    result: Result = json.loads(out.strip().splitlines()[-1])
    return result


def contend(name: str, load: Load, path: Path, args: argparse.Namespace) -> Result:
    script, *options = CONTENDERS[name]
    python = args.vllm_python if name.startswith("vllm") else sys.executable
    repeats = 1 if name in ONCE else args.repeats
    result = run(
        [python, HERE / "contenders" / script, path, "--repeats", repeats, *options], args.threads, args.limit_s
    )
    if "seconds" in result:
        rates = sorted(load.num_tokens / s for s in result["seconds"])  # type: ignore[attr-defined]
        result |= {"tokens_per_s": statistics.median(rates), "slowest": rates[0], "fastest": rates[-1]}
    return result


def ratios(results: dict[str, Result]) -> dict[str, float]:
    """The embedded engine's rate over that of each other, and over the best of vLLM's settings."""
    rates = {name: float(r["tokens_per_s"]) for name, r in results.items() if "tokens_per_s" in r}  # type: ignore[arg-type]
    if "embedded" not in rates:
        return {}
    others = {name: rate for name, rate in rates.items() if name != "embedded"}
    if vllm := [rate for name, rate in rates.items() if name.startswith("vllm")]:
        others["best vllm"] = max(vllm)
    return {name: rates["embedded"] / rate for name, rate in others.items()}


def show(load: Load, results: dict[str, Result]) -> None:
    print(f"\n{load.name}: {len(load.prompts)} requests, {load.num_tokens} tokens, {load.dtype}")
    over = ratios(results)
    for name, result in results.items():
        if "tokens_per_s" in result:
            rate, low, high = (result[key] for key in ("tokens_per_s", "slowest", "fastest"))
            ratio = f"embedded is {over[name]:.2f}x" if name in over else ""
            print(f"  {name:28s} {rate:8.0f} tok/s  ({low:.0f} to {high:.0f})  {ratio}")
        else:
            print(f"  {name:28s} failed: {str(result['error']).splitlines()[-1][:120]}")
    if "best vllm" in over:
        print(f"  embedded is {over['best vllm']:.2f}x the best of vLLM", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", default="fixed,tail,large")
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--limit-s", type=float, default=300, help="of one contender, all its rounds together")
    parser.add_argument("--vllm-python", type=Path, default=VLLM_PYTHON)
    parser.add_argument("--small", action="store_true", help="tiny loads: whether it works, not how fast it is")
    parser.add_argument("--out", type=Path, help="default: results/engine-DATE.json")
    args = parser.parse_args()
    names = [n for n in args.contenders.split(",") if args.vllm_python.exists() or not n.startswith("vllm")]
    record: Result = {"command": sys.argv, "date": str(date.today()), "threads": args.threads, "machine": machine()}
    loads: dict[str, Result] = {}
    with tempfile.TemporaryDirectory() as folder:
        for load_name in args.loads.split(","):
            load = make_load(load_name, Path(folder), small=args.small)
            path = load.write(Path(folder) / f"{load_name}.json")
            results = {}
            for name in names:
                results[name] = contend(name, load, path, args)
            show(load, results)
            loads[load_name] = {"num_tokens": load.num_tokens, "results": results, "ratios": ratios(results)}
            if load_name == "fixed":
                sizes = "1,2,4" if args.small else "1,2,4,8,16,32,64,128"
                record["measures"] = run(
                    [sys.executable, HERE / "measures.py", path, "--batch-sizes", sizes], args.threads, args.limit_s
                )
                print(json.dumps(record["measures"], indent=1))
    record["loads"] = loads
    out = args.out or HERE / "results" / f"engine-{date.today()}.json"
    out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"\nrecorded in {out}")


if __name__ == "__main__":
    main()

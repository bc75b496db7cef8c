"""The Python packages: are they there, do they import, do their versions fit together?"""

import platform
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, requires
from importlib.util import find_spec
from typing import Any

from megatron_opo.doctor.findings import Finding, judged
from megatron_opo.doctor.import_steps import module_of
from megatron_opo.environment import INSTALL, PLACEHOLDERS, Facts, find_faults

# Those of requirements.txt and requirements/, which a wheel comes without.
TESTED = {
    "torch": ("2.13.0", "2.14.1"),
    "megatron-core": ("0.16.1", "0.19.2"),
    "transformers": ("5.19.0",),
    "sglang": ("0.5.23",),
    "transformer-engine": ("2.20.2",),
}
# SGLang pins what it runs on with a GPU, a CUDA build of torch among it.
DECLARED = ("torch", "transformers", "tokenizers", "megatron-core", "transformer-engine")
SMALL = {
    "psutil": "",  # its absence is a fault of the environment
    "pydantic": "recipes",
    "PyYAML": "recipes",
    "numpy": "everything",
    "safetensors": "weights",
    "pyarrow": "parquet files",
    "rich": "the terminal",
    "aiohttp": "talking to servers",
    "orjson": "talking to servers",
    "Jinja2": "reports",
    "tensorboard": "TensorBoard's logs",
    "math-verify": "the reward `math`",
    "reasoning-gym": "procedural tasks",
}
KERNEL_PACKAGES = ("sglang-kernel", "sgl-kernel", PLACEHOLDERS)
OTHERS_IMPORT = ("triton", "transformers", "megatron-core", "transformer-engine", "apex", "sglang")


def steps_of(facts: Facts) -> list[str]:
    """What to import, of what is installed."""
    if "torch" not in facts.packages:
        return []
    steps = ["torch", "gpus"] if facts.gpu else ["torch"]
    steps += [
        name
        for name in OTHERS_IMPORT
        if name in facts.packages and not (name == "apex" and facts.foreign_apex)
    ]
    kernels = ["sgl-kernel"] if kernel_package(facts) else []
    return [*steps, *kernels, "plugins"]


def kernel_package(facts: Facts) -> str | None:
    return next((name for name in KERNEL_PACKAGES if name in facts.packages), None)


def check_packages(facts: Facts, imports: dict[str, dict[str, Any]]) -> list[Finding]:
    """`imports` are the results of `steps_of`; `facts` include what torch was built for."""
    faults: dict[str, list[str]] = {}
    for subject, text in find_faults(facts):
        faults.setdefault(subject, []).append(text)
    return [
        _python(faults),
        _package("torch", facts, imports, faults, torch_build(imports)),
        _nccl(facts, imports),
        _triton(facts, imports),
        _package("transformers", facts, imports, faults),
        _package("megatron-core", facts, imports, faults),
        _transformer_engine(facts, imports),
        _apex(facts, imports, faults),
        _sglang(facts, imports, faults),
        _sgl_kernel(facts, imports, faults),
        _plugin(facts, imports),
        _small_packages(facts, faults),
        _declared(facts),
    ]


def _python(faults: dict[str, list[str]]) -> Finding:
    found = f"{platform.python_version()}, {platform.system()} {platform.machine()}"
    texts = faults.get("python", [])
    return judged("Python", found, "problem" if texts else "ok", "; ".join(texts))


def with_torch(facts: Facts, imports: dict[str, dict[str, Any]]) -> Facts:
    """With what torch was built for; "unknown" if it cannot say."""
    result = imports.get("torch", {})
    return replace(facts, torch_cuda=result.get("cuda") if "version" in result else "unknown")


def torch_build(imports: dict[str, dict[str, Any]]) -> str:
    if "version" not in imports.get("torch", {}):
        return ""
    cuda = imports["torch"]["cuda"]
    return f"built for CUDA {cuda}" if cuda else "built for CPUs"


def _package(
    name: str,
    facts: Facts,
    imports: dict[str, dict[str, Any]],
    faults: dict[str, list[str]],
    detail: str = "",
) -> Finding:
    """A package that is needed: faults of the environment first, then its import, then whether
    its version was tested."""
    version = facts.packages.get(name)
    if texts := faults.get(name):
        return Finding(name, version or "not installed", "problem", "; ".join(texts))
    if version is None:
        return Finding(name, "not installed", "problem", f"it is needed: {INSTALL}")
    if broken := _broken(name, name, version, imports.get(name, {})):
        return broken
    found = ", ".join(part for part in (version, detail, _seconds(imports.get(name, {}))) if part)
    tested = TESTED.get(name, ())
    if tested and version.partition("+")[0] not in tested:
        return Finding(
            name,
            found,
            "note",
            f"tested with {' and '.join(tested)}; if it fails, install that: {INSTALL}",
        )
    return Finding(name, found)


def _seconds(result: dict[str, Any]) -> str:
    return f"imported in {result['seconds']:.1f} s" if "seconds" in result else ""


def _broken(name: str, package: str, version: str, result: dict[str, Any]) -> Finding | None:
    if "without_torch" in result:
        return Finding(
            name, f"{version}, not tried, as torch cannot be imported", "note", "repair torch first"
        )
    if "error" in result:
        module = module_of(package)
        return Finding(
            name,
            f"{version}, cannot be imported: {result['error']}",
            "problem",
            f"`python -c 'import {module}'` shows all of it; then install it anew: {INSTALL}",
        )
    return None


def _nccl(facts: Facts, imports: dict[str, dict[str, Any]]) -> Finding:
    torch = imports.get("torch", {})
    if torch.get("nccl"):
        return Finding("NCCL", torch["nccl"])
    if facts.gpu is None:
        return Finding("NCCL", "not there; without a GPU ranks talk over gloo")
    if "version" not in torch:
        return Finding("NCCL", "not known, as torch cannot be imported", "note", "repair torch")
    return Finding(
        "NCCL",
        "not in this build of torch",
        "problem",
        "GPUs talk over it: install the cluster stack (`make setup STACK=cluster`)",
    )


def _triton(facts: Facts, imports: dict[str, dict[str, Any]]) -> Finding:
    version = facts.packages.get("triton")
    if version is None and facts.gpu is None:
        return Finding("triton", "not installed; only GPUs use it")
    if version is None:
        return Finding(
            "triton", "not installed", "problem", f"kernels on GPUs are written in it: {INSTALL}"
        )
    broken = _broken("triton", "triton", version, imports.get("triton", {}))
    return broken or Finding("triton", version)


def _transformer_engine(facts: Facts, imports: dict[str, dict[str, Any]]) -> Finding:
    name = "Transformer Engine"
    version = facts.packages.get("transformer-engine")
    if version is None and facts.gpu is None:
        return Finding(name, "not installed; only GPUs use it")
    if version is None:
        return Finding(
            name,
            "not installed",
            "note",
            "training runs on Megatron-Core's own layers, which are slower; the cluster stack has "
            "it (`make setup STACK=cluster`)",
        )
    if "error" in (result := imports.get("transformer-engine", {})):
        return Finding(
            name,
            f"{version}, cannot be imported: {result['error']}",
            "problem",
            "Megatron-Core imports it where it is installed. Build it anew beside this torch and "
            "CUDA, as requirements.txt says, or remove it: `pip uninstall transformer-engine`",
        )
    return _package("transformer-engine", facts, imports, {})


def _apex(
    facts: Facts, imports: dict[str, dict[str, Any]], faults: dict[str, list[str]]
) -> Finding:
    version = facts.packages.get("apex")
    if version is None and (spec := find_spec("apex")) is not None:
        places = list(spec.submodule_search_locations or ()) or [spec.origin or "?"]
        return Finding(
            "Apex",
            f"not installed, but Python finds {places[0]}",
            "note",
            "Megatron-Core would import that: if it is not NVIDIA's, rename it or take its "
            "directory off PYTHONPATH",
        )
    if version is None:
        return Finding("Apex", "not installed; it is optional")
    if texts := faults.get("apex"):
        return Finding("Apex", f"{version}, not NVIDIA's", "problem", "; ".join(texts))
    broken = _broken("Apex", "apex", version, imports.get("apex", {}))
    return broken or Finding("Apex", f"{version}, NVIDIA's")


def _sglang(
    facts: Facts, imports: dict[str, dict[str, Any]], faults: dict[str, list[str]]
) -> Finding:
    if "sglang" in facts.packages:
        return _package("sglang", facts, imports, faults)
    return Finding(
        "sglang",
        "not installed",
        "problem",
        f"it is the server that samples: {INSTALL}. Not needed where rollout.urls names servers "
        "that run elsewhere",
    )


def _sgl_kernel(
    facts: Facts, imports: dict[str, dict[str, Any]], faults: dict[str, list[str]]
) -> Finding:
    name, package = "SGLang's kernels", kernel_package(facts)
    if package is None:
        return Finding(
            name,
            "no sgl_kernel",
            "problem",
            f"SGLang does not start without: {INSTALL} (on a CPU it installs stand-ins)",
        )
    if texts := faults.get(package):
        return Finding(name, f"{package} {facts.packages[package]}", "problem", "; ".join(texts))
    shown = f"{package} {facts.packages[package]}"
    broken = _broken(name, "sgl-kernel", shown, imports.get("sgl-kernel", {}))
    what = "stand-ins for a CPU" if package == PLACEHOLDERS else package
    return broken or Finding(name, f"{what} {facts.packages[package]}")


def _plugin(facts: Facts, imports: dict[str, dict[str, Any]]) -> Finding:
    name, result = "SGLang's plugin", imports.get("plugins", {})
    if "torch" not in facts.packages or result.get("without_torch"):
        return Finding(name, "not tried without torch", "note", "repair torch first")
    mine = [n for n, value in result.get("plugins", {}).items() if value.startswith("megatron_opo")]
    if "error" in result or not mine:
        return Finding(
            name,
            result.get("error", "not registered"),
            "note" if facts.gpu else "problem",
            "servers find it by the metadata of this package, and on a CPU sample reproducibly "
            "only with it: `pip install --no-deps -e .` in this project's directory",
        )
    if failed := result["failed"]:
        shown = "; ".join(f"{plugin} fails: {error}" for plugin, error in failed.items())
        return Finding(
            name, shown, "problem", f"servers load it when they start: install it anew, {INSTALL}"
        )
    return Finding(name, f"registered ({', '.join(result['plugins'])})")


def _small_packages(facts: Facts, faults: dict[str, list[str]]) -> Finding:
    name = "other packages"
    missing = {p: why for p, why in SMALL.items() if p.lower() not in facts.packages}
    texts = list(faults.get("psutil", []))
    texts += [f"{p} is needed for {why}: {INSTALL}" for p, why in missing.items() if why]
    if texts:
        return Finding(name, f"missing: {', '.join(missing)}", "problem", "; ".join(texts))
    return Finding(name, f"all {len(SMALL)} are there")


def _declared(facts: Facts) -> Finding:
    """Do the packages that matter find the versions that they declare?"""
    name = "versions"
    asking = [p for p in DECLARED if p in facts.packages]
    if facts.gpu and "sglang" in facts.packages:
        asking.append("sglang")
    try:
        unfit = [line for package in asking for line in unfit_requirements(package, facts.packages)]
    except ImportError:
        return Finding(
            name, "not compared, as `packaging` is not installed", "note", f"needed: {INSTALL}"
        )
    if not unfit:
        return Finding(name, "fit together, as far as the packages say")
    return Finding(name, "; ".join(unfit), "note", f"install the pinned ones: {INSTALL}")


def unfit_requirements(package: str, installed: dict[str, str]) -> Iterator[str]:
    """Such as "torch 2.13.0, but sglang 0.5.23 asks for torch==2.14.1".

    Raises:
        ImportError: the package `packaging` is not installed.
    """
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        declared = requires(package) or []
    except PackageNotFoundError:
        return
    for text in declared:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        name = requirement.name.lower().replace("_", "-")
        found = installed.get(name)
        if found is None:
            yield f"no {name}, but {package} {installed[package]} asks for it"
        elif not requirement.specifier.contains(found, prereleases=True):
            asked = f"{name}{requirement.specifier}"
            yield f"{name} {found}, but {package} {installed[package]} asks for {asked}"

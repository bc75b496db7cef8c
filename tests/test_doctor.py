"""The doctor against real machines' answers and faults that are really there."""

import io
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from threading import Event

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_opo.doctor import for_recipe, gpus, machine, packages, slurm, storage
from megatron_opo.doctor.findings import Finding
from megatron_opo.doctor.imports import try_imports
from megatron_opo.doctor.screen import print_findings
from megatron_opo.environment import Facts
from megatron_opo.recipe_file import load_recipe

ROOT = Path(__file__).resolve().parent.parent
# As nvidia-smi 570 prints them; the header is cut.
NVIDIA_SMI = """#!/bin/sh
case "$*" in
*memory.used*)
    echo '0, NVIDIA H100 80GB HBM3, 570.86.15, 81559, 4'
    echo '1, NVIDIA H100 80GB HBM3, 570.86.15, 81559, 70211' ;;
*--query-gpu=name*)
    echo 'NVIDIA H100 80GB HBM3'
    echo 'NVIDIA H100 80GB HBM3' ;;
*)
    echo '| NVIDIA-SMI 570.86.15     Driver Version: 570.86.15     CUDA Version: 12.8     |' ;;
esac
"""
SINFO = """#!/bin/sh
case "$*" in
*--version*) echo 'slurm 23.11.4' ;;
*)
    echo 'gpu01|idle|128|1031000|gpu:h100:8(S:0-1)'
    echo 'gpu01|idle|128|1031000|gpu:h100:8(S:0-1)'
    echo 'gpu02|mixed-|128|1031000|gpu:h100:8(S:0-1),nvme:1'
    echo 'gpu03|down*|128|1031000|gpu:h100:8(S:0-1)'
    echo 'cpu01|idle~|64|515000|(null)' ;;
esac
"""
NO_CONTROLLER = """#!/bin/sh
[ "$1" = --version ] && { echo 'slurm 23.11.4'; exit 0; }
echo 'slurm_load_partitions: Unable to contact slurm controller (connect failure)' >&2
exit 1
"""
GPU_FACTS = Facts((3, 12), {"torch": "2.14.1"}, None, "NVIDIA H100", "13.0")


def program(directory: Path, name: str, text: str) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / name).write_text(text)
    (directory / name).chmod(0o755)
    return directory


def package(directory: Path, name: str, code: str) -> None:
    (directory / name).mkdir(parents=True)
    (directory / name / "__init__.py").write_text(code)


def named(findings: list[Finding], name: str) -> Finding:
    (found,) = [finding for finding in findings if finding.name == name]
    return found


def doctor(
    *arguments: str, python: str = sys.executable, path: str = "", cwd: Path = ROOT, **environment
) -> tuple[int, dict]:
    """Its exit code and what it found, by name; a traceback fails."""
    done = subprocess.run(
        [python, "-m", "megatron_opo", "doctor", "--json", *arguments],
        env=os.environ | {"PYTHONPATH": f"{path}{os.pathsep}{ROOT}"} | environment,
        cwd=cwd,
        capture_output=True,
        text=True,
    )
    assert done.stderr == ""
    answer = json.loads(done.stdout)
    findings = {finding["name"]: finding for finding in answer["findings"]}
    assert len(findings) == len(answer["findings"])
    statuses = [finding["status"] for finding in findings.values()]
    assert (answer["problems"], answer["notes"]) == tuple(map(statuses.count, ("problem", "note")))
    assert answer["fit"] == (answer["problems"] == 0)
    for finding in findings.values():
        assert bool(finding["what_to_do"]) == (finding["status"] != "ok"), finding
    return done.returncode, findings


def test_this_machine(tmp_path):
    code, found = doctor(cwd=tmp_path)
    for name in ("torch", "transformers", "megatron-core", "sglang"):
        assert found[name]["status"] == "ok"
        assert found[name]["found"].startswith(f"{version(name)}, ")
    assert found["SGLang's plugin"]["status"] == "ok"
    assert "megatron_opo" in found["SGLang's plugin"]["found"]
    assert found["cores"]["found"].startswith(str(len(os.sched_getaffinity(0))))
    assert found["run directory"]["found"].startswith("runs, ")
    assert not list(tmp_path.iterdir())  # it leaves nothing behind
    assert code == (1 if any(f["status"] == "problem" for f in found.values()) else 0)


def test_a_broken_torch_and_the_apex_of_pypi_are_findings(tmp_path):
    package(tmp_path, "torch", "raise OSError('libcudart.so.13: cannot open shared object file')")
    package(tmp_path, "apex", "from pyramid.config import Configurator")
    metadata = tmp_path / "apex-0.9.10.dev0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: apex\nVersion: 0.9.10.dev0\n")
    (metadata / "RECORD").write_text("apex/__init__.py,,\n")
    code, found = doctor(path=str(tmp_path), OMP_NUM_THREADS="4096")
    assert code == 1
    assert found["torch"]["status"] == "problem"
    assert "OSError: libcudart.so.13: cannot open shared object" in found["torch"]["found"]
    assert "make setup" in found["torch"]["what_to_do"]
    for name in ("megatron-core", "sglang"):
        assert found[name]["status"] == "note" and "torch" in found[name]["found"]
    assert found["Apex"]["status"] == "problem"
    assert "0.9.10.dev0" in found["Apex"]["found"]
    assert "pip uninstall apex" in found["Apex"]["what_to_do"]
    assert found["threads"]["status"] == "note"


def test_where_no_package_is_installed(tmp_path):
    """A Python with nothing but what reads recipes."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    needed = ("pydantic", "pydantic_core", "annotated_types", "typing_inspection", "yaml")
    modules = [Path(sys.modules[name].__file__).parent for name in needed]
    modules.append(Path(sys.modules["typing_extensions"].__file__))
    (tmp_path / "links").mkdir()
    for module in modules:
        (tmp_path / "links" / module.name).symlink_to(module)
    code, found = doctor(
        python=str(tmp_path / "venv" / "bin" / "python"), path=str(tmp_path / "links")
    )
    assert code == 1
    for name in ("torch", "transformers", "megatron-core", "sglang"):
        assert found[name]["status"] == "problem"
        assert found[name]["found"] == "not installed"
        assert "make setup" in found[name]["what_to_do"]
    assert "aiohttp" in found["other packages"]["found"]
    assert found["Apex"]["status"] == "ok"


def test_imports_that_raise_crash_hang_or_exit(tmp_path, monkeypatch):
    package(tmp_path, "raises", "print('noise'); raise ValueError('first line\\nsecond')")
    package(tmp_path, "crashes", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    package(tmp_path, "hangs", "import time; print('noise', flush=True); time.sleep(600)")
    package(tmp_path, "leaves", "import os; os._exit(3)")
    package(tmp_path, "exits", "raise SystemExit('not on this machine')")
    package(tmp_path, "fine", "")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    steps = ["raises", "crashes", "leaves", "exits", "fine"]
    results = try_imports(steps, seconds=60.0, stop=Event())
    results |= try_imports(["hangs"], seconds=1.0, stop=Event())
    assert results["raises"] == {"error": "ValueError: first line"}
    assert "SIGSEGV" in results["crashes"]["error"]
    assert "had not ended after" in results["hangs"]["error"]
    assert "code 3" in results["leaves"]["error"]
    assert results["exits"] == {"error": "SystemExit: not on this machine"}
    assert 0 <= results["fine"]["seconds"] < 60


def test_ctrl_c_ends_it_and_the_import_that_hangs(tmp_path):
    os.mkfifo(tmp_path / "began")
    code = f"import os, time; open({str(tmp_path / 'began')!r}, 'w').write(str(os.getpid()))"
    package(tmp_path, "torch", f"{code}; time.sleep(600)")
    command = [sys.executable, "-m", "megatron_opo", "doctor"]
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    running = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        # What runs the tests may ignore it, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    importing = int((tmp_path / "began").read_text())
    running.send_signal(signal.SIGINT)
    assert running.communicate()[1] == "interrupted\n"
    assert running.returncode == 130
    with pytest.raises(ProcessLookupError):
        os.kill(importing, 0)


def test_what_nvidia_smi_says(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    directory = program(tmp_path / "bin", "nvidia-smi", NVIDIA_SMI)
    monkeypatch.setenv("PATH", str(directory), prepend=os.pathsep)
    driver, cards = gpus.check_driver()
    assert driver == Finding("driver", "570.86.15, for CUDA up to 12.8")
    assert cards.status == "note"
    assert cards.found == "2 x NVIDIA H100 80GB HBM3, 80 GiB; memory in use on 1"
    imports = {"torch": {"version": "2.14.1", "cuda": "13.0"}, "gpus": {"gpus": [], "sick": []}}
    (cuda,) = gpus.check_cuda(GPU_FACTS, imports)
    assert cuda.status == "problem"
    assert cuda.found == "torch is built for 13.0, the driver for 12.8 at most"


def test_a_cpu_build_of_torch_beside_a_gpu_is_a_problem(tmp_path, monkeypatch):
    facts = Facts((3, 12), {"torch": "2.13.0+cpu"}, None, "NVIDIA H100", None)
    imports = {"torch": {"version": "2.13.0+cpu", "cuda": None, "nccl": None, "seconds": 1.0}}
    found = packages.check_packages(packages.with_torch(facts, imports), imports)
    assert named(found, "torch").status == "problem"
    assert "STACK=cluster" in named(found, "torch").what_to_do
    assert named(found, "NCCL").status == "problem"


def test_a_torch_that_does_not_import_is_not_called_a_cpu_build():
    facts = Facts((3, 12), {"torch": "2.14.1"}, None, "NVIDIA H100", None)
    imports = {"torch": {"error": "OSError: libcublas"}}
    found = packages.check_packages(packages.with_torch(facts, imports), imports)
    assert "OSError: libcublas" in named(found, "torch").found


def test_a_driver_that_does_not_answer(tmp_path, monkeypatch):
    text = "#!/bin/sh\necho 'Failed to initialize NVML: Driver/library version mismatch'\nexit 18\n"
    directory = program(tmp_path / "bin", "nvidia-smi", text)
    monkeypatch.setenv("PATH", str(directory), prepend=os.pathsep)
    (driver,) = gpus.check_driver()
    assert driver.status == "problem"
    assert "Driver/library version mismatch" in driver.found


def test_without_gpu_or_compiler_nothing_is_a_problem(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CXX", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    compiler = named(gpus.check_compilers(Facts((3, 12), {}, None, None, None)), "C++ compiler")
    assert compiler.status == "note" and "fall back to torch" in compiler.what_to_do
    (there, *_), nodes = slurm.check_slurm({})
    assert (there.status, nodes) == ("ok", 0)


def test_a_compiler_that_compiles_nothing(tmp_path, monkeypatch):
    directory = program(tmp_path / "bin", "cc", "#!/bin/sh\necho 'no cmath' >&2\nexit 1\n")
    monkeypatch.setenv("CXX", str(directory / "cc"))
    compiler = named(gpus.check_compilers(Facts((3, 12), {}, None, None, None)), "C++ compiler")
    assert compiler.status == "note" and "compiles nothing: no cmath" in compiler.found


def test_what_sinfo_says(tmp_path, monkeypatch):
    for name in slurm.COMMANDS:
        program(tmp_path / "bin", name, SINFO)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    (commands, cluster), nodes = slurm.check_slurm({})
    assert nodes == 4
    assert commands.status == "ok" and commands.found.startswith("slurm 23.11.4: ")
    assert cluster.status == "ok"
    assert cluster.found == "4 nodes (2 idle, 1 mixed, 1 down); 3 with 8 x h100"


@pytest.mark.parametrize(
    ("resources", "gpus_and_kind"),
    [
        ("gpu:8", (8, "")),
        ("gpu:a100:4(S:0,1)", (4, "a100")),
        ("gpu:a100_3g.40gb:2(S:0),gpu:a100:1(S:1)", (3, "a100_3g.40gb+a100")),
        ("nvme:2,shard:16", (0, "")),
        ("(null)", (0, "")),
    ],
)
def test_generic_resources(resources, gpus_and_kind):
    assert slurm.count_gpus(resources) == gpus_and_kind


def test_a_controller_that_does_not_answer_is_a_note(tmp_path, monkeypatch):
    for name in slurm.COMMANDS:
        program(tmp_path / "bin", name, NO_CONTROLLER)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    (_, cluster), nodes = slurm.check_slurm({})
    assert (cluster.status, nodes) == ("note", 0)
    assert "Unable to contact slurm controller" in cluster.found


def test_a_job_whose_gpus_torch_does_not_see(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    for name, value in (("JOB_ID", "7"), ("JOB_NUM_NODES", "2"), ("GPUS_ON_NODE", "8")):
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("SLURM_SUBMIT_DIR", str(tmp_path / "elsewhere"))
    findings, _ = slurm.check_slurm({"gpus": {"gpus": ["NVIDIA H100"] * 8}})
    assert named(findings, "job").found == "in job 7 of 2 nodes, 8 GPUs on this one"
    assert named(findings, "job's directory").status == "problem"
    findings, _ = slurm.check_slurm({"gpus": {"gpus": ["NVIDIA H100"] * 7}})
    assert named(findings, "job").status == "problem"


MOUNTS = r"""22 1 8:1 / / rw shared:1 - ext4 /dev/sda1 rw
30 22 0:30 / /home rw - nfs4 filer:/home rw
31 30 0:31 / /home/my\040data rw - lustre mds@tcp:/scratch rw
32 22 0:32 / /tmp rw - tmpfs tmpfs rw
"""


@pytest.mark.parametrize(
    ("path", "kind", "is_shared"),
    [
        ("/homeless/runs", "ext4", False),
        ("/home/me/runs", "nfs4", True),
        ("/home/my data/runs", "lustre", True),
        ("/tmp", "tmpfs", False),
    ],
)
def test_the_mount_of_a_path(path, kind, is_shared):
    mount = storage.mount_of(Path(path), MOUNTS)
    assert (mount.kind, mount.is_shared) == (kind, is_shared)


@pytest.mark.parametrize("path", ["/", "/dev/shm", "/proc"])
def test_mounts_of_this_machine_are_what_df_says(path):
    df = subprocess.run(["df", "--output=fstype", path], capture_output=True, text=True)
    assert storage.mount_of(Path(path)).kind == df.stdout.split()[-1]


def test_directories_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    run, cache, _ = storage.check_storage(Path("/proc/runs"))
    assert run.status == "problem" and "run_dir=" in run.what_to_do
    assert cache.status == "note" and "XDG_CACHE_HOME" in cache.what_to_do


def test_a_run_directory_in_memory_is_a_note():
    assert storage.check_storage(Path("/dev/shm/runs"))[0].status == "note"


def test_a_local_run_directory_matters_in_a_cluster_only():
    assert storage.check_shared(Path("/dev/shm"), nodes=0).status == "ok"
    assert storage.check_shared(Path("/dev/shm"), nodes=4).status == "note"


def test_limits_of_this_process(monkeypatch):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
        findings = machine.check_machine(bucket_mb=256)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    files = named(findings, "open files")
    assert files.status == "note" and "ulimit -n" in files.what_to_do


def test_shared_memory_that_weights_do_not_fit_into():
    size = os.statvfs("/dev/shm")
    enough = size.f_bavail * size.f_frsize // 2**20
    shared = named(machine.check_machine(bucket_mb=enough), "/dev/shm")
    assert shared.status == "problem" and "--shm-size" in shared.what_to_do


def test_a_container_s_share_of_the_cores(tmp_path, monkeypatch):
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    monkeypatch.setattr(machine, "CGROUPS", tmp_path)
    monkeypatch.setattr(machine, "OWN_CGROUP", tmp_path / "cgroup")
    (tmp_path / "cgroup").write_text("0::/docker/7\n")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert machine.core_quota() == 0.5
    (tmp_path / "memory.max").write_text(f"{2**30}\n")
    (tmp_path / "memory.current").write_text(f"{2**29}\n")
    assert machine.available_memory() == 2**29
    findings = machine.check_machine(bucket_mb=256)
    assert named(findings, "cores").found.endswith("limited to the time of 0.5")
    assert named(findings, "free memory").status == "note"


def recipe_of(tmp_path: Path, *overrides: str):
    config = (ROOT / "recipes" / "models" / "DeepSeek-R1-Distill-Llama-70B.json").read_text()
    model = tmp_path / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(config)
    (model / "model.safetensors").touch()
    data = tmp_path / "train.jsonl"
    data.write_text('{"prompt": "2+2=", "answer": "4"}\n')
    common = [
        f"model.path={model}",
        f"data.train={{files: [{data}]}}",
        f"data.eval={{files: [{data}]}}",
    ]
    common += [f"run_dir={tmp_path}/runs/{{name}}"]
    return load_recipe(ROOT / "recipes" / "opo_70b.yaml", [*common, *overrides])


def test_70b_on_a_laptop(tmp_path):
    findings = for_recipe.check_recipe(recipe_of(tmp_path), Path("x.yaml"), {})
    assert named(findings, "model").found.endswith("70,553,706,496 parameters")
    assert named(findings, "memory").status == "problem"
    assert named(findings, "data").status == "ok"


def test_70b_on_nodes_of_eight_gpus(tmp_path):
    here = {"gpus": {"gpus": ["NVIDIA H200"] * 8, "memory": [139 * 2**30] * 8}}
    findings = for_recipe.check_recipe(recipe_of(tmp_path), Path("x.yaml"), here)
    assert named(findings, "GPU memory").status == "ok"
    cards = named(findings, "GPUs")
    assert cards.status == "note" and "nodes like this one" in cards.found
    small = {"gpus": {"gpus": ["NVIDIA L4"] * 8, "memory": [22 * 2**30] * 8}}
    findings = for_recipe.check_recipe(recipe_of(tmp_path), Path("x.yaml"), small)
    assert named(findings, "GPU memory").status == "problem"


def test_a_recipe_whose_files_are_not_there(tmp_path):
    overrides = [
        f"model.path={tmp_path}/none",
        "data.train={files: [none.parquet]}",
        "reward.function=mathh",
        "rollout.function=none.py:speak",
    ]
    findings = for_recipe.check_recipe(recipe_of(tmp_path, *overrides), Path("x.yaml"), {})
    for name in ("model", "data", "reward", "rollout function"):
        assert named(findings, name).status == "problem"
    assert "did you mean `math`?" in named(findings, "reward").found


def test_a_recipe_whose_loggers_cannot_start(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        for override, found in (
            ("log.loggers=[wandb]", "pip install wandb"),
            (f"log.prometheus_port={port}", str(port)),
        ):
            recipe = recipe_of(tmp_path, override)
            findings = for_recipe.check_recipe(recipe, Path("x.yaml"), {})
            loggers = named(findings, "loggers")
            assert loggers.status == "problem" and found in loggers.found


def test_paths_that_the_system_refuses_to_look_at(tmp_path):
    name = tmp_path / ("x" * 300)
    overrides = [f"model.path={name}", f"data.train={{files: [{name}.jsonl]}}", f"run_dir={name}"]
    findings = for_recipe.check_recipe(recipe_of(tmp_path, *overrides), Path("x.yaml"), {})
    for name in ("model", "data"):
        assert named(findings, name).status == "problem"
        assert "File name too long" in named(findings, name).found


def test_a_server_s_port_that_is_taken(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        recipe = recipe_of(tmp_path, f"rollout.port={port}", "rollout.servers=1")
        findings = for_recipe.check_recipe(recipe, Path("x.yaml"), {})
    ports = named(findings, "servers' ports")
    assert ports.status == "problem" and str(port) in ports.found


def test_a_mistake_in_what_is_asked_ends_with_2(tmp_path):
    command = [sys.executable, "-m", "megatron_opo", "doctor", str(tmp_path / "none.yaml")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "no such file" in done.stderr and done.stdout == ""


def test_the_tested_versions_are_those_that_are_pinned():
    pins: dict[str, set[str]] = {}
    for file in (ROOT / "requirements").glob("*.txt"), [ROOT / "requirements.txt"]:
        for path in file:
            pattern = r"^([\w-]+)(?:\[[^]]*\])?==([\w.]+)"
            for name, pinned in re.findall(pattern, path.read_text(), re.MULTILINE):
                pins.setdefault(name, set()).add(pinned)
    assert {name: set(tested) for name, tested in packages.TESTED.items()} == {
        name: pins[name] for name in packages.TESTED
    }


def test_versions_that_do_not_fit_together(tmp_path, monkeypatch):
    metadata = tmp_path / "asking-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: asking\nVersion: 1.0\nRequires-Dist: tokenizers<0.24,>=0.23\n"
        "Requires-Dist: absent>=1\nRequires-Dist: extra; extra == 'gpu'\n"
        "Requires-Dist: torch>=2; python_version >= '3.8'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    installed = {"asking": "1.0", "tokenizers": "0.22.1", "torch": "2.13.0+cpu"}
    assert sorted(packages.unfit_requirements("asking", installed)) == [
        "no absent, but asking 1.0 asks for it",
        "tokenizers 0.22.1, but asking 1.0 asks for tokenizers<0.24,>=0.23",
    ]


TEXT = st.text("abcdefghijklm ./-", max_size=300)
FINDINGS = st.builds(
    lambda found, cure, status: Finding("name", found, status, cure if status != "ok" else ""),
    TEXT,
    TEXT,
    st.sampled_from(["ok", "note", "problem"]),
)


@settings(max_examples=40)
@given(st.lists(FINDINGS, min_size=1, max_size=4))
def test_the_screen_has_every_word_in_100_columns_without_colours(findings):
    file = io.StringIO()
    print_findings({"Section": findings}, file)
    text = file.getvalue()
    assert all(len(line) <= 100 for line in text.splitlines())
    assert text.replace("\n", "").isprintable()
    squeezed = "".join(text.replace("->", "").split()).replace("-", "")
    for finding in findings:
        for part in (finding.found, finding.what_to_do):
            assert "".join(part.split()).replace("->", "").replace("-", "") in squeezed
    problems = [line for line in text.splitlines() if line.startswith("  PROBLEM ")]
    assert len(problems) == sum(f.status == "problem" for f in findings)

"""Imports point one way, so that each part can be read, tested and replaced alone."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "megatron_opo"
BASE = {"batch", "errors", "recipe", "redaction"}
ALLOWED = {
    "batch": {"errors"},
    "errors": set(),
    "failure": {"environment", "errors", "redaction"},
    "output": set(),
    "environment": {"errors"},
    "completion": {"errors", "recipe_file"},
    "redaction": set(),
    "recipe": {"redaction"},
    "recipe_file": {"errors", "recipe", "redaction"},
    "import_verl": {"errors", "recipe", "redaction"},
    "model_fit": {"checkpoint_source", "errors", "recipe", "weights"},
    "runs": {"errors", "recipe"},
    "checkpoint_files": {"errors", "runs", "weights"},
    "checkpoint_source": {"errors", "runs"},
    "convert": {"checkpoint_source", "convert_check", "errors", "failure", "observe", "weights"},
    "convert_check": {"actor", "errors", "weights"},
    "spans": set(),
    "spmd": {"errors", "spans"},
    "stop": set(),
    "on_policy": {"batch", "errors"},
    "gap_causes": set(),
    "gap_report": {"batch", "gap_causes", "on_policy", "recipe"},
    "advantages": BASE | {"kernel_build"},
    "rows": BASE | {"procedural"},
    "procedural": BASE,
    "prompts": BASE | {"rows", "procedural"},
    "rewards": BASE | {"procedural", "user_code"},
    "observe": {"batch", "errors", "ports", "spans"},
    "invariant": set(),
    "kernel_build": {"errors"},
    "user_code": set(),
    "ports": set(),
    "compare": {"errors", "failure", "observe", "recipe_file"},
    "start_summary": BASE | {"observe", "plan", "prompts", "weights"},
    "attention_kernel": {"errors", "invariant", "kernel_build"},
    "sglang_plugin": {"attention_kernel", "invariant"},
    "rollout": BASE | {"ports", "sglang_plugin", "spans", "user_code"},
    "weights": BASE,
    "actor": BASE
    | {"attention_kernel", "checkpoint_files", "invariant", "model_fit", "on_policy", "plan"}
    | {"runs", "spans", "spmd", "weights"},
    "dynamic_sampling": BASE,
    "launch": {"errors", "failure", "ports", "stop"},
    "plan": {"errors", "model_fit", "recipe", "recipe_file", "weights"},
    "data": BASE | {"observe", "prompts", "recipe_file", "rows"},
    "doctor": {"environment", "errors", "kernel_build", "model_fit", "observe", "plan"}
    | {"preflight", "recipe", "recipe_file", "rewards", "rows", "runs", "user_code", "weights"},
    "cluster": BASE,
    "preflight": BASE | {"cluster", "environment"},
    "node": BASE
    | {"cluster", "failure", "launch", "observe", "preflight", "recipe_file", "rollout", "runs"},
    "early": {"observe", "recipe", "rollout", "rows", "runs"},
    "desk": BASE
    | {"advantages", "checkpoint_files", "dynamic_sampling"}
    | {"environment", "observe", "prompts", "recipe_file", "rewards", "rollout", "runs", "spans"}
    | {"spmd", "start_summary", "stop"},
    "replay": {"batch", "errors"},
    "collect": BASE | {"advantages", "desk", "dynamic_sampling", "observe", "replay"},
    "update": BASE | {"actor", "advantages", "collect", "desk", "gap_report", "replay", "spmd"},
    "profiling": BASE | {"desk", "observe", "spans", "spmd"},
    "train": BASE
    | {"actor", "checkpoint_source", "collect", "desk", "model_fit", "observe", "on_policy"}
    | {"profiling", "rollout", "runs", "spmd", "update", "weights"},
    "train_only": BASE
    | {"actor", "advantages", "model_fit", "replay", "runs", "spmd", "train", "update"},
    "rollout_only": BASE
    | {"advantages", "checkpoint_files", "collect", "desk", "early"}
    | {"model_fit", "observe", "replay"},
    "train_command": BASE
    | {"actor", "early", "environment", "failure", "launch", "model_fit", "observe", "output"}
    | {
        "preflight",
        "recipe_file",
        "rollout",
        "rollout_only",
        "runs",
        "spmd",
        "train",
        "train_only",
    },
    "bisect": {"actor", "batch", "errors", "recipe", "recipe_file", "rollout", "weights"},
    "evaluation": BASE
    | {"checkpoint_source", "convert", "environment", "model_fit", "observe", "prompts"}
    | {"recipe_file", "rewards", "rollout", "rows", "runs", "stop", "weights"},
}
ONLY_IN = {"megatron": {"actor", "weights"}, "sglang": {"sglang_plugin"}}


def imports_of(path: Path) -> set[str]:
    """Dotted names of all absolute imports, also of those inside functions."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def parts() -> list[tuple[str, Path]]:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if part not in ("__init__", "__main__", "cli"):
            found.append((part, path))
    return found


def test_every_part_imports_only_what_stands_before_it():
    for part, path in parts():
        assert part in ALLOWED, f"say in this test what {part} may import"
        for name in imports_of(path):
            if name.startswith("megatron_opo."):
                target = name.split(".")[1]
                if target not in (part, "__version__", "BEGAN", "BEGAN_VARIABLE"):
                    assert target in ALLOWED[part], f"{path} imports {name}"


def test_megatron_and_sglang_are_imported_where_they_belong():
    for part, path in parts():
        for library, allowed in ONLY_IN.items():
            uses = any(name.split(".")[0] == library for name in imports_of(path))
            assert not uses or part in allowed, f"{path} imports {library}"


def calls_of(path: Path) -> set[str]:
    """What is called or inherited from in it, as it is written: "pickle.loads", "time.time"."""
    tree = ast.parse(path.read_text())
    names = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names += [base for n in ast.walk(tree) if isinstance(n, ast.ClassDef) for base in n.bases]
    return {ast.unparse(name) for name in names}


def callers(*names: str) -> set[str]:
    return {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if calls_of(path) & set(names)
    }


def test_nothing_is_unpickled_but_what_cannot_run_code():
    """The one unpickler refuses all but a few names; torch.load reads tensors only."""
    assert callers("pickle.load", "pickle.loads", "eval", "exec", "np.load") == set()
    assert callers("pickle.Unpickler") == {"weights/torch_dist.py"}
    assert callers("torch.load") == {"weights/chunk_file.py"}
    assert "weights_only=True" in (PACKAGE / "weights" / "chunk_file.py").read_text()


def test_no_deadline_depends_on_the_clock_of_the_wall():
    assert callers("time.time", "datetime.now") == {
        "doctor/machine.py",  # is the clock right?
        "doctor/storage.py",  # compares it with a file server's
        "preflight.py",  # compares the nodes' clocks
        "observe/console.py",  # writes the time down
        "observe/logger_backends.py",  # so does this
        "observe/run_log.py",  # and this
        "weights/new_directory.py",  # the age of what a killed process left
    }

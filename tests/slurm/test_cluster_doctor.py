"""The doctor reads what this Slurm's own commands say."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CODE = """
from megatron_opo.doctor.slurm import check_slurm
findings, nodes = check_slurm({})
print(nodes)
for finding in findings:
    print(finding.name, finding.status, finding.found, sep="|")
"""


def test_the_doctor_sees_the_nodes_and_the_job(slurm):
    python = [sys.executable, "-c", CODE]
    nodes, commands, cluster = slurm.run(*python, cwd=ROOT).stdout.splitlines()
    assert nodes == "3"
    assert commands.startswith("Slurm|ok|slurm")
    assert cluster == "cluster|ok|3 nodes (3 idle); 3 with 8 x h200"
    *_, job = slurm.run("srun", "--nodes=1", *python, cwd=ROOT).stdout.splitlines()
    assert job.startswith("job|ok|in job ") and "of 1 node" in job

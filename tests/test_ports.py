import socket
import subprocess
import sys
from contextlib import closing

import pytest

from megatron_opo.ports import claim_port

SERVES = {
    "asyncio": """
import asyncio, sys
async def serve():
    await asyncio.start_server(lambda *_: None, "127.0.0.1", int(sys.argv[1]))
asyncio.run(serve())
""",
    "torch": """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=True, wait_for_workers=False)
store.set("name", "value")
assert store.get("name") == b"value"
""",
}

# In a network of its own, where only the claimed port and three more are there to be given.
NARROW = """
import socket
from contextlib import suppress
from pathlib import Path

from megatron_opo.ports import claim_port

claim = claim_port("127.0.0.1", 40_001)
Path("/proc/sys/net/ipv4/ip_local_port_range").write_text("40000 40003")
listener = socket.create_server(("127.0.0.1", 30_000))
given = []
for reuse in (0, 1):
    held = []
    with suppress(OSError):
        while True:
            held.append(socket.socket())
            held[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
            held[-1].bind(("127.0.0.1", 0))
            given.append(held[-1].getsockname()[1])
    for each in held:
        each.close()
with suppress(OSError):
    while True:
        held.append(socket.create_connection(("127.0.0.1", 30_000)))
        given.append(held[-1].getsockname()[1])
print(sorted(given))
"""


def test_what_asks_for_a_free_port_or_connects_never_gets_it():
    script = f"ip link set lo up && exec {sys.executable} -c '{NARROW}'"
    outcome = subprocess.run(
        ["unshare", "--map-root-user", "--net", "bash", "-c", script],
        capture_output=True,
        text=True,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stdout.split("\n")[0] == str(3 * [40_000] + 3 * [40_002] + 3 * [40_003])


@pytest.mark.parametrize("program", SERVES)
def test_another_process_serves_on_it(program):
    with closing(claim_port("127.0.0.1")) as claim:
        host, port = claim.getsockname()
        with pytest.raises(OSError, match="in use"), socket.socket() as other:
            other.bind((host, port))
        subprocess.run([sys.executable, "-c", SERVES[program], str(port)], check=True)


def test_a_port_that_is_served_cannot_be_claimed():
    with (
        socket.create_server(("127.0.0.1", 0)) as served,
        pytest.raises(OSError, match="in use"),
    ):
        claim_port("127.0.0.1", served.getsockname()[1])

"""A response of several turns: the policy writes a sum, and a calculator writes what it comes to.

The policy of `quickstart_cpu.yaml` shows its work, "48+76=8+6=14,4+7+1=12;124". Here it only writes
the left sides; whenever it has written "=" the calculator adds the result, whose tokens carry no
loss. What is left to learn is which sums to ask for, and to read the answers together.
"""

import re

SUM = re.compile(r"(\d+(?:\+\d+)+)=$")


async def solve(episode) -> None:
    while True:
        turn = await episode.generate(stop="=")
        if turn.stop is None:  # the end token: the answer stands there
            return
        asked = SUM.search(episode.text)
        if asked:
            episode.add(str(sum(map(int, asked[1].split("+")))))

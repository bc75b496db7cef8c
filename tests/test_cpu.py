"""The stand-ins for CUDA: what they answer, and that they stay where they belong."""

import threading

from tests.ranks import run_ranks


def answers() -> dict:
    import torch

    from megatron_opo.actor.cpu import enable_cpu

    before = torch.cuda.is_available()
    enabled = (enable_cpu(), enable_cpu())
    x = torch.ones(2, 3, device="cuda", pin_memory=True)
    found = {
        "available": (before, torch.cuda.is_available()),
        "enabled": enabled,
        "devices": {
            str(y.device)
            for y in (
                x,
                x.cuda(),
                x.to("cuda"),
                x.to(torch.device("cuda", 0), torch.bfloat16),
                torch.empty_like(x, device="cuda"),
                torch.tensor([1.0], device=torch.device("cuda:1")),
                torch.zeros(1, device=torch.cuda.current_device()),
            )
        },
        "same": x.cuda() is x,
        "types": [x.type(), x.bfloat16().type(), x.type(torch.float64).dtype == torch.float64],
    }
    torch.cuda.synchronize()
    torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())

    def elsewhere() -> None:
        found["thread before"] = x.type()
        enable_cpu()
        found["thread after"] = x.type()

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    return found


def test_cuda_means_cpu_where_there_is_none():
    (found,) = run_ranks(1, answers)
    assert found["available"] == (False, False)
    assert found["enabled"] == (True, True)
    assert found["devices"] == {"cpu"}
    assert found["same"]
    assert found["types"] == ["torch.cuda.FloatTensor", "torch.cuda.BFloat16Tensor", True]
    assert found["thread before"] == "torch.FloatTensor"
    assert found["thread after"] == "torch.cuda.FloatTensor"

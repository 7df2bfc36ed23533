"""torch's compiler is not loaded by training, and is there as soon as something needs it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.ranks_launcher import REPOSITORY

pytestmark = pytest.mark.launches

TRAIN = """
import sys, torch, hpctrain
session = hpctrain.init(backend="serial")
model = torch.nn.Linear(4, 2)
updater = session.distributed_optimizer(model, torch.optim.Adam(model.parameters(), lr=0.1))
for step in range(3):
    updater.backward(model(torch.ones(3, 4)).square().mean(), weight=1.0)
    updater.step()
loaded = lambda: sorted({"sympy", "torch._dynamo.symbolic_convert"} & set(sys.modules))
"""
CASES = {
    "training does not load it": "assert loaded() == [], loaded()",
    "torch.compile does": """
square = torch.compile(lambda x: x * x, backend="eager")
assert square(torch.tensor(3.0)) == 9
assert len(loaded()) == 2
updater.backward(model(torch.ones(3, 4)).square().mean(), weight=1.0)
updater.step()
assert type(sys.modules["torch._dynamo"]).__name__ == "module"
assert torch._dynamo is sys.modules["torch._dynamo"]
compiled = torch.compile(model, backend="eager")
loss = compiled(torch.ones(3, 4)).square().mean()
updater.backward(loss, weight=1.0)
updater.step()
""",
    "an import of a part of it does": """
from torch._dynamo.utils import counters
import torch._dynamo.config
assert counters is torch._dynamo.utils.counters
assert torch._dynamo.config.cache_size_limit > 0
""",
    "a look at all modules does not": """
import inspect
inspect.getmodule(inspect.currentframe())
assert loaded() == [], loaded()
""",
    "determinism reaches compiled code": """
from hpctrain.run.compute.postponed_dynamo import set_deterministic
set_deterministic()
assert torch.are_deterministic_algorithms_enabled()
assert torch.is_deterministic_algorithms_warn_only_enabled()
assert loaded() == [], loaded()
torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
import torch._inductor.config
assert getattr(torch._inductor.config, "deterministic", True)  # from PyTorch 2.9 on
""",
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_compiler_is_loaded_when_it_is_needed(case: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TRAIN + case + "\nsession.close()"],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr

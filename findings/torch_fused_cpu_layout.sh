#!/bin/bash
# PyTorch: on CPUs a fused optimizer pairs the elements of parameter, gradient and moments by their places in memory.
#
# torch.optim.SGD, Adam, AdamW and Adagrad with fused=True read the tensors of a parameter as flat arrays and do not
# compare their strides. If one of them has another memory layout, elements that do not belong together are combined,
# without an error or a warning. It happens when a model continues in channels_last with moments that were saved
# before. The same optimizers without fused=True, and those for CUDA, are right.
#
# Seen with torch 2.13.0: largest differences of a weight from the same training in one layout, after one more step:
#   fused=False: 0.0000   fused=True: more than 0.0001
# Exits with 1 if that is no longer so.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat > "$work/case.py" <<'P'
import torch

torch.set_num_threads(1)


def weight_after_resume(memory_format: torch.memory_format, *, fused: bool) -> torch.Tensor:
    torch.manual_seed(0)
    images = torch.randn(8, 3, 9, 9)
    model = torch.nn.Conv2d(3, 16, 3)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)

    def step() -> None:
        optimizer.zero_grad()
        model(images).square().mean().backward()
        optimizer.step()

    for _ in range(3):
        step()
    saved, moments = model.state_dict(), optimizer.state_dict()
    model = torch.nn.Conv2d(3, 16, 3).to(memory_format=memory_format)
    model.load_state_dict(saved)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    optimizer.load_state_dict(moments)
    step()
    return model.weight.detach()


found = {}
for fused in (False, True):
    one, other = (
        weight_after_resume(layout, fused=fused) for layout in (torch.contiguous_format, torch.channels_last)
    )
    found[fused] = (one - other).abs().max().item()
    print(f"torch {torch.__version__} fused={fused}: {found[fused]:.4f}")
raise SystemExit(0 if found[False] < 1e-5 and found[True] > 1e-4 else 1)
P
python3 -m pip install --quiet --target "$work/torch" "torch==2.13.0" "numpy==2.2.6"  # 3 GB, if built for GPUs
PYTHONPATH="$work/torch" python3 "$work/case.py"

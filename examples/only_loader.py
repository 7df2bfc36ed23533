"""Only the loader: hpctrain's shards in a script that has its own training loop. No launcher, no MPI.

hpctrain data pack digits data/digits
python examples/only_loader.py data/digits/train
"""

import sys

from hpctrain import Dataset, Loader

dataset = Dataset.open(sys.argv[1])
loader = Loader(dataset, global_batch=64, seed=0)
for epoch in range(2):
    num_samples = 0
    for batch in loader.epoch(epoch):
        num_samples += batch.num_samples  # batch.fields["image"]: (num_samples, 1, 8, 8)
    print(f"epoch {epoch}: {num_samples} samples of {dataset.num_samples}, each once")

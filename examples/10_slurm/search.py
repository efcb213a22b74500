"""Search a small grid: every row is a job with one GPU; two jobs run at a time."""

import itertools

from multi import train

from parallelize import SlurmLauncher

on_one_gpu = train.options(gpus=1, num_nodes=1, launcher=SlurmLauncher(time="00:10:00"))
grid = [{"lr": lr, "batch_size": size} for lr, size in itertools.product([1e-4, 2e-3], [16, 128])]

if __name__ == "__main__":
    jobs = on_one_gpu.submit_many(grid, at_most=2)
    rows = [(job.result(), row) for job, row in zip(jobs, grid, strict=True)]
    for found, row in sorted(rows, key=lambda each: each[0]):
        print(f"{found:.3f}  {row}")
    best, row = max(rows, key=lambda each: each[0])
    print(f"best: {row}, accuracy on 360 unseen images {best:.3f}")

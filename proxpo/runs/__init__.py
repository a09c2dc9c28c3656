"""Files of a run's folder: one reader and one writer of each.

    files       writes a file whole or not at all
    folder      the folder itself, held by one process with a lock
    jsonlines   metrics.jsonl and samples.jsonl
    sinks       metrics to metrics.jsonl, TensorBoard, trackio and wandb
    status      summary.json and failure.json, and the status that follows from them
    checkpoint  checkpoints/step-N, in the format of trees; stop ends a run between steps
    yaml_file   config.yaml, plans and every other YAML file
    page        report.html and every other page

No other module opens these files.
"""

"""One evaluation with lm-eval, in its own environment: what every choice of every row scored.

Knows nothing of this package: the arguments are the model's kind and options, as lm-eval names
them, and the file to write.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import lm_eval
from lm_eval.tasks import TaskManager

TASK = "facts"


def main(kind: str, options: str, output: str) -> None:
    """Evaluate; write the metrics, and log-likelihoods in the order of rows and choices."""
    found = lm_eval.simple_evaluate(
        model=kind,
        model_args=json.loads(options),
        tasks=[TASK],
        task_manager=TaskManager(include_path=str(Path(__file__).parent), include_defaults=False),
        bootstrap_iters=0,
        log_samples=True,
    )
    samples = sorted(found["samples"][TASK], key=lambda sample: sample["doc_id"])
    metrics = {key: value for key, value in found["results"][TASK].items() if key != "alias"}
    values = {
        "metrics": {name: value for name, value in metrics.items() if "stderr" not in name},
        "rows": [[(float(a), bool(b)) for a, b in one["filtered_resps"]] for one in samples],
    }
    Path(output).write_text(json.dumps(values))


if __name__ == "__main__":
    main(*sys.argv[1:])

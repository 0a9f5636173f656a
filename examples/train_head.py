"""Train a small EAGLE-3 head for a small random decoder, then draft with it. For real models: `outrider train eagle3`.

Prints the tokens per target pass that validation simulated, and those that decoding then reached.
"""

import sys
import tempfile
from pathlib import Path

from outrider.core.decode import decode
from outrider.core.distribution import Sampling
from outrider.core.drafters.trained.eagle import Eagle3Head
from outrider.core.engine.transformer import Config, Decoder
from outrider.core.methods import make_drafter, make_rule
from outrider.core.trace import Trace
from outrider.core.training.dataset import Lesson, TargetTeacher
from outrider.core.training.head_training import HeadTraining
from outrider.core.training.trainer import Plan, Trainer

config = Config(vocabulary=48, hidden_size=32, layers=3, heads=4, kv_heads=2, head_dim=8, intermediate_size=48)
target = Decoder.random(config, seed=3)


def answers(prompts, drafter=None):  # greedy; row i answers prompt i
    greedy = Sampling(temperature=0)
    return Trace(tuple(decode(target, drafter, make_rule(), prompts, sampling=greedy, max_new_tokens=20)))


prompts = [[n % 48, (7 * n + 1) % 48, 5] for n in range(96)]
written = answers(prompts)  # the head learns from what the target itself writes
lessons = [Lesson(tuple(prompt), tuple(written.tokens(row))) for row, prompt in enumerate(prompts)]
head = Eagle3Head(target, taps=("layer.0", "layer.1", "last"))
plan = Plan(minutes=1, steps=int(sys.argv[1]) if sys.argv[1:] else 300, rate=3e-3, precision="no")
with tempfile.TemporaryDirectory() as folder:  # weights, curve and checkpoint
    data, out = (lambda *_: lessons[:80], lessons[80:]), Path(folder)
    training = HeadTraining(TargetTeacher(target), {"eagle3": head}, *data, out, tokens=256, depth=4)
    print(f"validation: {Trainer(training, plan, out).run().best['eagle3']:.2f} tokens per target pass")

drafter = make_drafter("eagle3", head=head.eval().drafts(target), draft_kind="chain", length=4)
print(f"decoding: {answers(prompts[80:], drafter).summary().tokens_per_pass:.2f} tokens per target pass")

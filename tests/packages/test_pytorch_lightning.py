"""The strategy bound to the package ``pytorch_lightning``. Run where ``lightning`` is absent, too (``tox``)."""

from importlib.util import find_spec

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader

from collective_strategy.pytorch_lightning import AuditSharing, CollectiveStrategy, ExplainSharing, VerifyReplicas
from collective_strategy.testing import run_ranks

pytestmark = pytest.mark.pytorch_lightning
HAS_LIGHTNING = find_spec("lightning") is not None


class Line(pl.LightningModule):
    """loss = mean(w * x), so that with a learning rate of 1 the weight is minus the sum over steps of the mean of x."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(()))
        self.seen = []

    def training_step(self, batch, _):
        self.seen.append(self.collective.all_gather(batch).flatten().tolist())
        return (self.w * batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def train(strategy, directory):
    torch.manual_seed(0)
    trainer = pl.Trainer(
        devices=2,
        accelerator="cpu",
        strategy=strategy,
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=directory,
        callbacks=[ExplainSharing(), AuditSharing(), VerifyReplicas(every_n_steps=1)],
    )
    module = Line()
    trainer.fit(module, DataLoader([torch.tensor(float(x)) for x in (1, 2, 3, 4)], batch_size=1))
    trainer.strategy.collective.teardown()
    return module.w.item(), sorted(x for step in module.seen for x in step), type(trainer.strategy).__module__


@pytest.mark.parametrize("strategy", ["collective", "collective_torch", CollectiveStrategy], ids=str)
def test_two_ranks_train_on_the_mean_of_their_samples(strategy, tmp_path):
    make = strategy if isinstance(strategy, str) else strategy()
    outcomes = run_ranks(2, lambda _: train(make, str(tmp_path)), backend=None)
    # two steps; the mean over the ranks' samples, summed over the steps, is (1 + 2 + 3 + 4) / 2
    expected = (-5.0, [1.0, 2.0, 3.0, 4.0], "collective_strategy.pytorch_lightning")
    assert [outcome.result() for outcome in outcomes] == [expected] * 2


def test_the_other_package_is_not_imported():
    (outcome,) = run_ranks(1, lambda _: find_spec("lightning") is not None, backend=None)
    assert outcome.result() == HAS_LIGHTNING

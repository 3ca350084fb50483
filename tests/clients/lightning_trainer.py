"""Lightning's Trainer with DDP: accumulation, clipping, validation, a metric, resumed once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from parameters import checksums
from support import report
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

REQUIREMENTS = ("lightning==2.6.6",)
RANKS = 2
IS_SHORT = False

ROWS, CLASSES, BATCH = 240, 4, 6


def rows() -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(ROWS, 12, generator=generator)
    return TensorDataset(x, (x @ torch.randn(12, CLASSES, generator=generator)).argmax(1))


def main(folder: Path, source: Path | None) -> dict[str, list[float]]:
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import DDPStrategy
    from torchmetrics.classification import MulticlassAccuracy

    class Classifier(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(12, 32), nn.Dropout(0.1), nn.GELU())
            self.head = nn.Linear(32, CLASSES)
            self.accuracy = MulticlassAccuracy(CLASSES)
            self.series: dict[str, list[float]] = {"losses": [], "validation": [], "accuracy": []}

        def loss(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            logits = self.head(self.layers(batch[0]))
            return nn.functional.cross_entropy(logits, batch[1]), logits

        def training_step(self, batch: Any, step: int) -> Tensor:
            loss, _ = self.loss(batch)
            self.series["losses"].append(float(loss.detach()))
            return loss

        def validation_step(self, batch: Any, step: int) -> None:
            loss, logits = self.loss(batch)
            self.accuracy.update(logits, batch[1])
            self.log("validation", loss, sync_dist=True)
            self.log("accuracy", self.accuracy)

        def on_validation_epoch_end(self) -> None:
            if not self.trainer.sanity_checking:
                self.series["accuracy"].append(float(self.accuracy.compute()))

        def on_train_epoch_end(self) -> None:
            self.series["validation"].append(float(self.trainer.callback_metrics["validation"]))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), 1e-2)

    def fit(epochs: int, checkpoint: str | None) -> tuple[dict[str, list[float]], str]:
        lightning.seed_everything(5, verbose=False)
        saver = ModelCheckpoint(folder, f"until{epochs}")
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=RANKS,
            strategy=DDPStrategy(process_group_backend="gloo"),
            max_epochs=epochs,
            accumulate_grad_batches=2,
            gradient_clip_val=0.5,
            callbacks=[saver],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=True,
            default_root_dir=folder,
        )
        model = Classifier()
        data = rows()
        loaders = DataLoader(data, BATCH, shuffle=True), DataLoader(data, BATCH)
        trainer.fit(model, *loaders, ckpt_path=checkpoint)
        return model.series, saver.best_model_path

    with checksums() as parameters:
        first, checkpoint = fit(2, None)
        resumed, _ = fit(4, checkpoint)
    return {
        **{f"first {name}": series for name, series in first.items()},
        **{f"resumed {name}": series for name, series in resumed.items()},
        "parameters": parameters,
    }


if __name__ == "__main__":
    report(main)

"""Photographs that come with scikit-image, noise on them, and a picture of what becomes of it."""

from collections.abc import Mapping, Sequence

import torch
from skimage import data, restoration
from torch import Tensor
from torch.utils.data import Dataset

TRAINING = ["coffee", "rocket", "stereo_motorcycle"]
HELD_OUT = {"chelsea": (20, 110), "astronaut": (10, 110)}  # and the corner of the part that is drawn
DRAWN = 224  # rows and columns of that part


def photograph(name: str) -> Tensor:
    """One of those in scikit-image's package, so nothing is downloaded.

    Returns:
        (3, rows, columns), float32, from 0 to 1. Rows and columns are cut to even numbers.
    """
    pixels = getattr(data, name)()
    if isinstance(pixels, tuple):  # two photographs and their depths
        pixels = pixels[0]
    rows, columns = (size // 2 * 2 for size in pixels.shape[:2])
    return torch.tensor(pixels[:rows, :columns]).permute(2, 0, 1).contiguous() / 255


def with_noise(clean: Tensor, noise: float, seed: int) -> Tensor:
    """With Gaussian noise that depends on the seed alone, so that all processes that share a photograph see the same.

    Args:
        noise: The standard deviation; white is 1.
    """
    generator = torch.Generator().manual_seed(seed)
    return clean + noise * torch.randn(clean.shape, generator=generator).to(clean.dtype)


class NoisyCrops(Dataset[tuple[Tensor, Tensor]]):
    """Square pieces of the training photographs, noisy and clean; the one of a number is always the same."""

    def __init__(self, number: int, size: int, noise: float, dtype: torch.dtype) -> None:
        self.number, self.size, self.noise, self.dtype = number, size, noise, dtype
        self.photographs = [photograph(name) for name in TRAINING]

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        which, mirrored, *corner = torch.rand(4, generator=torch.Generator().manual_seed(index)).tolist()
        whole = self.photographs[int(which * len(self.photographs))]
        row, column = (int(x * (size - self.size + 1)) for x, size in zip(corner, whole.shape[1:], strict=True))
        clean = whole[:, row : row + self.size, column : column + self.size].to(self.dtype)
        if mirrored < 0.5:
            clean = clean.flip(2)
        return with_noise(clean, self.noise, seed=index), clean


class HeldOut(Dataset[tuple[Tensor, Tensor, int]]):
    """Whole photographs that training does not see: noisy, clean, and their number."""

    def __init__(self, noise: float) -> None:
        self.noise = noise

    def __len__(self) -> int:
        return len(HELD_OUT)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor, int]:
        clean = photograph(list(HELD_OUT)[number])  # an IndexError ends a loop over them
        return with_noise(clean, self.noise, seed=number), clean, number


def non_local_means(noisy: Tensor, noise: float) -> Tensor:
    """The classic to compare with: a pixel becomes the mean of those whose surroundings look alike (Buades 2005)."""
    result = restoration.denoise_nl_means(
        noisy.permute(1, 2, 0).numpy(), h=0.6 * noise, sigma=noise, patch_size=5, patch_distance=6, channel_axis=-1
    )
    return torch.from_numpy(result).permute(2, 0, 1)


def psnr(image: Tensor, clean: Tensor) -> float:
    """Peak signal to noise ratio in dB; 10 dB more mean a tenth of the squared error."""
    return float(-10 * torch.log10((image.clamp(0, 1) - clean).square().mean()))


def draw(kinds: Mapping[str, Sequence[Tensor]], clean: Sequence[Tensor], path: str) -> None:
    """A part of each held-out photograph, in one row per photograph; the PSNR is that of the whole photograph."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from PIL import Image

    columns = {**kinds, "original": clean}
    figure, axes = pyplot.subplots(len(clean), len(columns), figsize=(9.2, 4.9), layout="constrained", squeeze=False)
    for number, (row, column) in enumerate(HELD_OUT.values()):
        for axis, (title, images) in zip(axes[number], columns.items(), strict=True):
            part = images[number][:, row : row + DRAWN, column : column + DRAWN]
            axis.imshow(part.permute(1, 2, 0).clamp(0, 1), interpolation="none")
            value = f": {psnr(images[number], clean[number]):.1f} dB" if title in kinds else ""
            axis.set(title=title + value, xticks=[], yticks=[])
    figure.savefig(path, dpi=100)
    Image.open(path).convert("RGB").quantize(256).save(path, optimize=True)  # noise makes large files

import torch


class Slow(torch.utils.data.Dataset):
    """Batches that take their time in torch."""

    size = 1000

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return torch.randn(300, 300) @ torch.randn(300, 300)

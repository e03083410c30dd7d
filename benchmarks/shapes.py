"""Shapes of the parameters of models that people train."""


def gpt2_small() -> list[tuple[int, ...]]:
    """124 million parameters in 148 tensors."""
    block = [(768,), (768,), (2304, 768), (2304,), (768, 768), (768,), (768,), (768,)]
    block += [(3072, 768), (3072,), (768, 3072), (768,)]
    return [(50257, 768), (1024, 768), *block * 12, (768,), (768,)]


def resnet50() -> list[tuple[int, ...]]:
    """25.6 million parameters in 161 tensors."""
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            convolutions = [(width, channels, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)]
            if block == 0:
                convolutions.append((4 * width, channels, 1, 1))
            for shape in convolutions:
                shapes += [shape, (shape[0],), (shape[0],)]
            channels = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


def many_small() -> list[tuple[int, ...]]:
    """2,000 tensors of 1,000 elements: adapters, experts, embeddings of categories."""
    return [(1000,)] * 2000

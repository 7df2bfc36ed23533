"""Layers of image classifiers: parameters and forward FLOPs, from their papers, in the order of the forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hpctrain.scaling import ReadyBucket

Layer = tuple[float, float]  # parameters, multiplications in the forward pass of one image


def vgg16() -> list[Layer]:
    """Simonyan and Zisserman 2014, arXiv:1409.1556, configuration D."""
    layers, inputs, side = [], 3, 224
    for width, depth in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(depth):
            layers.append(_conv(inputs, width, 3, side))
            inputs = width
        side //= 2
    dense = [(25088, 4096), (4096, 4096), (4096, 1000)]
    return [*layers, *((a * b + b, a * b) for a, b in dense)]


def resnet(depths: Sequence[int]) -> list[Layer]:
    """He et al. 2015, arXiv:1512.03385, with bottlenecks: ResNet-50 is (3, 4, 6, 3), ResNet-101 (3, 4, 23, 3)."""
    layers, inputs = [_conv(3, 64, 7, 112)], 64
    for stage, depth in enumerate(depths):
        width, side = 64 * 2**stage, 56 // 2**stage
        for block in range(depth):
            layers += [
                _conv(inputs, width, 1, side),
                _conv(width, width, 3, side),
                _conv(width, 4 * width, 1, side),
            ]
            if block == 0:
                layers.append(_conv(inputs, 4 * width, 1, side))
            inputs = 4 * width
    return [*layers, (inputs * 1000 + 1000, inputs * 1000)]


def inception_v3() -> list[Layer]:
    """Szegedy et al. 2015, arXiv:1512.00567: parameters of the modules as in their reference implementations, and the
    side of each module's output."""
    modules = [
        (864, 149), (9216, 147), (18432, 147), (5120, 73), (138240, 71),
        (254976, 35), (276480, 35), (284160, 35), (1152000, 17),
        (1294336, 17), (1687552, 17), (1687552, 17), (2138112, 17), (1695744, 8),
        (5038080, 8), (6070272, 8),
    ]  # fmt: skip
    return [*((float(count), float(count * side * side)) for count, side in modules), (2049000.0, 2048000.0)]


def gradients_of(layers: Sequence[Layer]) -> tuple[ReadyBucket, ...]:
    """The gradients of each layer in the order of backward, which takes time in proportion to the multiplications."""
    return tuple(_in_backward_order(layers))


def _in_backward_order(layers: Sequence[Layer]) -> Iterator[ReadyBucket]:
    total, done = sum(flops for _, flops in layers), 0.0
    for parameters, flops in reversed(layers):
        done += flops
        yield ReadyBucket(4.0 * parameters, min(1.0, done / total))


def _conv(inputs: int, outputs: int, kernel: int, side: int) -> Layer:
    weights = inputs * outputs * kernel * kernel
    return weights + 2.0 * outputs, float(weights * side * side)

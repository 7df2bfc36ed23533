VERSION: int

def adam(
    numbers: list[int],
    factor: float,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    /,
) -> None: ...
def sgd(
    numbers: list[int],
    factor: float,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    /,
) -> None: ...

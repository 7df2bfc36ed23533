from .strategies import (
    DDPStrategy as DDPStrategy,
    ModelParallelStrategy as ModelParallelStrategy,
    SessionEnvironment as SessionEnvironment,
)

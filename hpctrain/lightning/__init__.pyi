from .environment import SessionEnvironment as SessionEnvironment
from .strategies import DDPStrategy as DDPStrategy, ModelParallelStrategy as ModelParallelStrategy

"""Pipeline parallelism: schedules as data, their validator and simulator, and the engine that runs them."""

__version__ = "0.1.0.dev0"

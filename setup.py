"""Package metadata. Tool settings are in pyproject.toml, pinned versions in requirements/."""

import re
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

root = Path(__file__).parent
version = re.search(r'__version__ = "([^"]+)"', (root / "hpctrain" / "version.py").read_text()).group(1)

PROGRAM = "hpctrain.launch.fork_server._fork_client"


class BuildParts(build_ext):
    """Builds shared libraries, and one program."""

    def build_extension(self, ext: Extension) -> None:
        if ext.name != PROGRAM:
            super().build_extension(ext)
            return
        objects = self.compiler.compile(ext.sources, output_dir=self.build_temp)
        place = Path(self.get_ext_fullpath(ext.name))
        self.compiler.link_executable(objects, place.name, output_dir=str(place.parent))


setup(
    name="hpctrain",
    version=version,
    description="Distributed PyTorch training on HPC systems: Horovod and MPI, parallel HDF5, collective checkpoints",
    long_description=(root / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["hpctrain", "hpctrain.*"]),
    package_data={
        "hpctrain": [
            "py.typed",
            "*.pyi",
            "*/*.pyi",
            "reduce/data_parallel/*.pyi",
            "reduce/shared_memory/*.pyi",
            "slurm/templates/*.j2",
            "bench/export/templates/*.j2",
            "report/templates/*.j2",
            "monitoring/files/*",
        ]
    },
    # Sums in shared memory. Without a compiler numpy makes them, and `hpctrain doctor` says so.
    ext_modules=[
        Extension(
            "hpctrain.reduce.shared_memory._add",
            ["hpctrain/reduce/shared_memory/_add.c"],
            extra_compile_args=["-O3", "-ffp-contract=off", "-fno-fast-math"],
            optional=True,
        ),
        # The optimizer's step in one pass over memory. Without a compiler PyTorch makes it.
        Extension(
            "hpctrain.reduce.data_parallel._one_pass",
            ["hpctrain/reduce/data_parallel/_one_pass.c"],
            extra_compile_args=["-O3", "-ffp-contract=off", "-fno-math-errno"],
            libraries=["m"],
            optional=True,
        ),
        # No modules of Python: a thread that ends a rank whose Python is blocked (comm/watchdog/gil_free_timer.py),
        # one that ends it at a second signal (resilience/second_signal.py), what a rank does at its exit
        # (comm/backends/mpi_process/exit_status.py), and a library that ranks preload where they outnumber the cores
        # (launch/yielding.py).
        Extension(
            "hpctrain.comm.watchdog._gil_free_timer",
            ["hpctrain/comm/watchdog/_gil_free_timer.c"],
            libraries=["pthread"],
            optional=True,
        ),
        Extension(
            "hpctrain.comm.backends.mpi_process._exit_status",
            ["hpctrain/comm/backends/mpi_process/_exit_status.c"],
            libraries=["pthread"],
            optional=True,
        ),
        Extension(
            "hpctrain.resilience._second_signal",
            ["hpctrain/resilience/_second_signal.c"],
            libraries=["pthread"],
            optional=True,
        ),
        Extension("hpctrain.launch._yield_by_sleep", ["hpctrain/launch/_yield_by_sleep.c"], optional=True),
        # A program, with the file name of a module: what stands for a rank that is forked (launch/fork_server).
        Extension(PROGRAM, ["hpctrain/launch/fork_server/_fork_client.c"], optional=True),
    ],
    cmdclass={"build_ext": BuildParts},
    install_requires=[
        "torch>=2.8",
        "numpy>=1.24",
        "h5py>=3.9",
        "typer>=0.12.5",
        "click<8.5",  # typer up to 0.24 warns with newer ones
        "rich>=13",
        "pydantic>=2.8",
        "psutil>=6",
        "xxhash>=3.4",
        "lazy-loader>=0.6",
        "jinja2>=3.1",
        'tomli>=2; python_version < "3.11"',
    ],
    extras_require={
        "mpi": ["mpi4py>=3.1.5"],
        "horovod": ["horovod==0.28.1"],
        "demo": ["scikit-learn>=1.3"],
        "formats": [
            "hdf5plugin>=4.2",
            "numcodecs>=0.12",
            "pandas>=2",
            "pyarrow>=14",
            "pillow>=9.1",
            "safetensors>=0.4",
        ],
        "optimizers": ["pytorch-optimizer>=3.11"],
        "lightning": ["lightning>=2.4"],
        "plot": ["matplotlib>=3.7"],
        "metrics": ["prometheus-client>=0.20"],
        "otlp": ["opentelemetry-sdk>=1.20", "opentelemetry-exporter-otlp-proto-http>=1.20"],
        "tensorboard": ["tensorboard>=2.14"],
        "mlflow": ["mlflow-skinny>=2.14", "sqlalchemy>=2", "alembic>=1.13"],
        "energy": ["nvidia-ml-py>=12"],
        "scaling": ["scipy>=1.11.1"],
        "predict": ["scipy>=1.11.1", "simpy>=4.1"],
        "testing": ["pytest>=8"],
        "test": [
            "pytest>=8",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.5",
            "hypothesis>=6.100",
            "scikit-learn>=1.3",
        ],
    },
    entry_points={"console_scripts": ["hpctrain = hpctrain.cli.main:main"]},
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: Console",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering",
        "Topic :: System :: Distributed Computing",
    ],
)

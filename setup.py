"""What pyproject.toml cannot say: recipes/ and examples/ are installed in the package, for `phalanx recipes`."""

from setuptools import find_namespace_packages, find_packages, setup

folders = find_namespace_packages(include=["recipes", "examples*"], exclude=["*__pycache__*"])
data = {f"phalanx.{folder}": folder.replace(".", "/") for folder in folders}

setup(
    packages=[*find_packages(include=["phalanx*"]), *data],
    package_dir=data,
    package_data={package: ["*"] for package in data},
)

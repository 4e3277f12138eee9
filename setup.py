"""What pyproject.toml cannot say: a build starts from nothing, or modules deleted since the last one come back."""

import shutil

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildFromNothing(build_py):
    def run(self):
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


setup(cmdclass={"build_py": BuildFromNothing})

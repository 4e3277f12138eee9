"""The operators: schema, fake, autograd Function and public function of each."""

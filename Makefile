# Each target is a recipe of ./x, which does the work and installs what is missing.
.PHONY: help build test demo bench ci
help:
	@bash ./x help
build:
	@bash ./x build
test:
	@bash ./x test $(STAGES)
demo:
	@KEEP=$(KEEP) bash ./x demo
bench:
	@bash ./x bench $(BENCH)
ci:
	@bash ./x ci

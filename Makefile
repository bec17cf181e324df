# Each target is a recipe of ./x, which does the work and installs what is missing.
.PHONY: help build test demo bench ci package install uninstall
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
package:
	@bash ./x package $(KIND)
# DESTDIR and PREFIX (/usr/local) are those of GNU's makefiles.
install:
	@DESTDIR='$(DESTDIR)' PREFIX='$(PREFIX)' bash ./x install
uninstall:
	@DESTDIR='$(DESTDIR)' PREFIX='$(PREFIX)' bash ./x uninstall

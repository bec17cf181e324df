//! Generates the code of the one interface; needs the program `capnp` (Debian: capnproto).

fn main() {
    println!("cargo::rerun-if-changed=echo.capnp");
    let compiled = capnpc::CompilerCommand::new().file("echo.capnp").run();
    if let Err(error) = compiled {
        eprintln!("compiling echo.capnp: {error} (is the program capnp installed?)");
        std::process::exit(1);
    }
}

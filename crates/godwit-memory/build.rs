//! Builds the mover's agent, which runs inside QEMU.

use std::path::PathBuf;

fn main() {
    let source = "agent/agent.c";
    println!("cargo::rerun-if-changed={source}");
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo says where"));
    let library = out.join("godwit-memory-agent.so");
    // Optimized in every profile: pages are held while the agent copies.
    let compiler = cc::Build::new()
        .opt_level(2)
        .debug(false)
        .pic(true)
        .warnings(true)
        .extra_warnings(true)
        .get_compiler();
    let mut command = compiler.to_command();
    command
        .args(["-shared", "-pthread", "-o"])
        .arg(&library)
        .arg(source);
    let status = command.status();
    assert!(
        status.as_ref().is_ok_and(|status| status.success()),
        "cannot build {source}: {status:?}; a C compiler is needed"
    );
}

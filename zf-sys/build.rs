//! Compiles the C++ shim against the libtorch that `LIBTORCH` names (set by `.cargo/config.toml`).

use std::env;
use std::path::PathBuf;
use std::process::ExitCode;

const SOURCES: [&str; 5] = ["heap.cpp", "autograd.cpp", "checkpoint.cpp", "storage.cpp", "runtime.cpp"];
const HEADERS: [&str; 1] = ["shim.h"];

fn main() -> ExitCode {
    println!("cargo:rerun-if-env-changed=LIBTORCH");
    println!("cargo:rerun-if-env-changed=LIBTORCH_INCLUDE");
    for file in SOURCES.iter().chain(&HEADERS) {
        println!("cargo:rerun-if-changed=src/shim/{file}");
    }

    // The same rule as torch-sys: `LIBTORCH_INCLUDE` wins over `LIBTORCH`, and both hold a folder `include`.
    let Some(root) = env::var_os("LIBTORCH_INCLUDE").or_else(|| env::var_os("LIBTORCH")) else {
        return refuse(
            "LIBTORCH is not set, so the headers of libtorch 2.11 cannot be found; build inside the workspace",
        );
    };
    let include = PathBuf::from(root).join("include");
    if !include.join("ATen/ATen.h").is_file() {
        return refuse(&format!("{} holds no ATen/ATen.h; fetch libtorch first", include.display()));
    }

    let mut build = cc::Build::new();
    build.cpp(true).std("c++17").flag("-Wall").flag("-Wextra").flag("-fvisibility=hidden");
    // System includes: libtorch's own headers are not held to our warnings.
    for folder in [include.clone(), include.join("torch/csrc/api/include")] {
        build.flag("-isystem").flag(folder);
    }
    if let Err(error) = build.files(SOURCES.iter().map(|file| format!("src/shim/{file}"))).try_compile("zf_shim") {
        return refuse(&format!("compiling the libtorch shim failed: {error}"));
    }
    ExitCode::SUCCESS
}

fn refuse(message: &str) -> ExitCode {
    eprintln!("zf-sys: {message}");
    ExitCode::FAILURE
}

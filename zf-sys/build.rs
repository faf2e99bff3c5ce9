//! Compiles the C++ shim against the libtorch that `LIBTORCH` names (set by `.cargo/config.toml`).

use std::env;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

const SOURCES: [&str; 6] = ["heap.cpp", "autograd.cpp", "checkpoint.cpp", "storage.cpp", "runtime.cpp", "stream.cpp"];
const HEADERS: [&str; 3] = ["shim.h", "arena.h", "heap.h"];

/// Compiled apart, with defines of its own and the parts of Gloo's and CUDA's headers that c10d's need.
const C10D: [&str; 7] = [
    "c10d.cpp",
    "gloo/algorithm.h",
    "gloo/common/error.h",
    "gloo/context.h",
    "gloo/rendezvous/store.h",
    "gloo/transport/device.h",
    "cuda",
];

fn main() -> ExitCode {
    println!("cargo:rerun-if-env-changed=LIBTORCH");
    println!("cargo:rerun-if-env-changed=LIBTORCH_INCLUDE");
    println!("cargo:rerun-if-env-changed=ZF_CUDA_INCLUDE");
    println!("cargo:rerun-if-env-changed=RUSTC_WORKSPACE_WRAPPER");
    for file in SOURCES.iter().chain(&HEADERS).chain(&C10D) {
        println!("cargo:rerun-if-changed=src/shim/{file}");
    }

    // Under clippy, cargo keeps the build scripts of a workspace apart from those of a build, and links nothing.
    let wrapper = env::var_os("RUSTC_WORKSPACE_WRAPPER").map(PathBuf::from);
    if wrapper.is_some_and(|wrapper| wrapper.file_stem().is_some_and(|name| name == "clippy-driver")) {
        return ExitCode::SUCCESS;
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

    let shim = SOURCES.iter().map(|file| format!("src/shim/{file}"));
    if let Err(error) = compiler(&include).files(shim).try_compile("zf_shim") {
        return refuse(&format!("compiling the libtorch shim failed: {error}"));
    }
    let mut c10d = compiler(&include);
    c10d.define("USE_DISTRIBUTED", None).define("USE_C10D_GLOO", None).include("src/shim");
    if env::var_os("CARGO_FEATURE_NCCL").is_some() {
        let Some(folders) = env::var_os("ZF_CUDA_INCLUDE") else {
            return refuse(
                "the feature `nccl` needs ZF_CUDA_INCLUDE: the folders of CUDA's and NCCL's headers, see README.md",
            );
        };
        c10d.define("USE_C10D_NCCL", None).define("ZF_NCCL", None);
        // The project's own declarations come last, for what the given folders lack.
        for folder in env::split_paths(&folders).chain(["src/shim/cuda".into()]) {
            c10d.flag("-isystem").flag(folder);
        }
    }
    if let Err(error) = c10d.file("src/shim/c10d.cpp").try_compile("zf_c10d") {
        return refuse(&format!("compiling the shim over c10d failed: {error}"));
    }
    ExitCode::SUCCESS
}

fn compiler(include: &Path) -> cc::Build {
    let mut build = cc::Build::new();
    // Lines for backtraces, as the profile asks of Rust: all of what a debugger could show takes half of the time.
    build.debug(false).flag_if_supported("-g1");
    build.cpp(true).std("c++17").flag("-Wall").flag("-Wextra").flag("-fvisibility=hidden");
    // System includes: libtorch's own headers are not held to our warnings.
    for folder in [include.to_path_buf(), include.join("torch/csrc/api/include")] {
        build.flag("-isystem").flag(folder);
    }
    build
}

fn refuse(message: &str) -> ExitCode {
    eprintln!("zf-sys: {message}");
    ExitCode::FAILURE
}

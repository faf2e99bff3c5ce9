//! The `zf` program with the built-in stages.

fn main() -> std::process::ExitCode {
    zf_cli::main()
}

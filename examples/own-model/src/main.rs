//! The `zf` program with the model of this crate beside the built-in ones.

// A dependency that is never named is not linked, and its models vanish.
use own_model as _;

fn main() -> std::process::ExitCode {
    zf_cli::main()
}

//! The `zf` program with the selector of this crate beside the built-in ones.

// A dependency that is never named is not linked, and its stages vanish.
use own_selector as _;

fn main() -> std::process::ExitCode {
    zf_cli::main()
}

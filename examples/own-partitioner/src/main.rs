//! The `zf` program with the partitioner of this crate beside the built-in one.

// A dependency that is never named is not linked, and its stages vanish.
use own_partitioner as _;

fn main() -> std::process::ExitCode {
    zf_cli::main()
}

//! `zf completions`: what a shell needs to complete the command line.

use std::io::Write;

use clap_complete::Shell;

/// Prints the completions of `command` for `shell`.
///
/// # Errors
/// An output that cannot be written.
pub fn run(shell: Shell, mut command: clap::Command, out: &mut dyn Write) -> anyhow::Result<()> {
    let name = command.get_name().to_owned();
    // The generator ends the process when its output is closed, so it gets memory to write to.
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut command, name, &mut text);
    out.write_all(&text)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_shell_gets_the_commands() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish, Shell::Elvish, Shell::PowerShell] {
            let command = clap::Command::new("zf").subcommand(clap::Command::new("inspect").about("Look into it"));
            let mut out = Vec::new();
            run(shell, command, &mut out).unwrap();
            assert!(String::from_utf8(out).unwrap().contains("inspect"), "{shell}");
        }
    }
}

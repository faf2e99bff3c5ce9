//! Processes that this program starts.

use std::os::unix::process::CommandExt;
use std::process::{Child, Command};

use rustix::process::{Pid, Signal, getpid, getppid, kill_process, set_parent_process_death_signal};

/// Gives the process a group of its own, so that the terminal's signals come here alone, and has the system send it
/// `signal` when the thread that starts it ends, which should be the main one.
pub(crate) fn tie(command: &mut Command, signal: Signal) {
    let parent = getpid();
    command.process_group(0);
    // SAFETY: between fork and exec only two system calls are made.
    unsafe {
        command.pre_exec(move || {
            set_parent_process_death_signal(Some(signal))?;
            // The parent may have died before.
            if getppid() == Some(parent) { Ok(()) } else { Err(std::io::ErrorKind::BrokenPipe.into()) }
        });
    }
}

/// Passes on one of SIGINT, SIGHUP and SIGTERM, by its number.
pub(crate) fn pass_on(signal: i32, child: &Child) {
    let signal = match signal {
        signal_hook::consts::SIGINT => Signal::INT,
        signal_hook::consts::SIGHUP => Signal::HUP,
        _ => Signal::TERM,
    };
    // One that has just ended needs none.
    let _ = kill_process(Pid::from_child(child), signal);
}

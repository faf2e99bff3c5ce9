//! Devices and links that the machine or each other do not suit: settings errors, with exit code 2.

use zf_core::Error;
use zf_core::train::Silent;
use zf_tests::{tiny, training};

/// The error of a run with these keys.
fn refused(keys: &str) -> Error {
    let folder = tempfile::tempdir().expect("a folder");
    let text = tiny("tiny-llama", &format!("run.steps = 1\nrun.micro_batch = 1\nrun.global_batch = 2\n{keys}"));
    let error = training(&text, folder.path()).run(&mut Silent).expect_err(keys);
    assert_eq!(error.exit_code(), 2, "{error}\nwith {keys}");
    error
}

#[test]
fn links_that_do_not_suit_the_device_are_settings_errors() {
    for offload in ["offload.kind = \"host\"", "offload.kind = \"zenflow\""] {
        for device in ["cpu\"", "emulated\"\ndevice.memory = \"64MiB\""] {
            for ranks in [1, 2] {
                let error = refused(&format!(
                    "{offload}\ntransport.ranks = {ranks}\ndevice.kind = \"{device}\ndevice.link = {{ kind = \"cuda\" }}\n"
                ));
                let text = error.to_string();
                assert!(text.contains("`device.link`") && text.contains("needs a CUDA device, found Cpu"), "{text}");
            }
        }
    }
}

#[test]
fn cuda_where_there_is_none_is_a_settings_error() {
    if zf_sys::device::cuda_available() {
        return;
    }
    for more in ["", "offload.kind = \"host\"\n", "offload.kind = \"zenflow\"\ndevice.link = { kind = \"cuda\" }\n"] {
        let error = refused(&format!("device.kind = \"cuda\"\n{more}"));
        assert!(error.to_string().contains("`device.kind = \"cuda\"` needs a CUDA libtorch"), "{error}");
    }
}

//! SIGKILL at random moments of a run that saves all the time.
//!
//! `ZF_TEST_KILLS` is the number of kills (3 by default, 20 in `make accept`), `ZF_TEST_SEED` repeats the moments of an
//! earlier test, which prints its seed.

use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::{assert_same_run, checkpoints, lines, run_file, shown, train_command, wait_until, write_run, zf_train};

fn number(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{variable} = {text:?} is no number")))
}

/// A splitmix64 generator: the moments need no quality, but have to be repeatable.
struct Moments(u64);

impl Moments {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z ^ (z >> 31)) % limit
    }
}

#[test]
fn a_run_survives_sigkill() {
    let kills = number("ZF_TEST_KILLS").unwrap_or(3);
    let clock = || SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |time| u64::from(time.subsec_nanos()));
    let seed = number("ZF_TEST_SEED").unwrap_or_else(clock);
    println!("ZF_TEST_SEED={seed} ZF_TEST_KILLS={kills}");
    let mut moments = Moments(seed);

    // A life makes at most 6 steps, so that the run lasts for all kills.
    let keys = format!(
        "run.steps = {}\nrun.global_batch = 4\nrun.micro_batch = 2\ndata.sequence_length = 32\n\
         data.order = \"shuffled\"\ndata.validation = 0.05\nrun.validate = {{ every = 5, sequences = 2 }}\n\
         run.checkpoint = {{ every = 1, keep = 2, best = true }}\ntransport.ranks = 2\npartition.stage = 1\n\
         schedule.kind = \"cosine\"\n",
        8 * kills + 4
    );
    let folder = tempfile::tempdir().expect("a folder");
    let file = write_run(folder.path(), &run_file("tiny-llama", &keys));
    let (whole, killed) = (folder.path().join("whole"), folder.path().join("killed"));
    let expected = zf_train(&file, &whole, &[]);

    for kill in 0..kills {
        // One life in four ends while the program starts; the others after some steps.
        let (steps, delay) = if moments.below(4) == 0 {
            (0, Duration::from_millis(moments.below(400)))
        } else {
            (1 + moments.below(5), Duration::from_micros(moments.below(30_000)))
        };
        life(&file, &killed, steps as usize, delay, &format!("kill {kill}: {steps} steps + {delay:?}, seed {seed}"));
    }
    let found = zf_train(&file, &killed, &["--resume", "auto"]);
    assert_same_run((&killed, &found), (&whole, &expected), &format!("seed {seed}")).expect("whole");
    let names = checkpoints(&killed);
    assert!(names.iter().all(|name| !name.starts_with('.')), "leftovers: {names:?}");
}

/// Starts or resumes the run and kills it `delay` after it made `steps` steps.
fn life(file: &Path, out: &Path, steps: usize, delay: Duration, case: &str) {
    let mut child = train_command(file, out, &["--resume", "auto"]).spawn().expect("the program starts");
    if steps > 0 {
        // On resumption later lines move away first, so the file shrinks before it grows.
        let (mut low, mut ended) = (lines(out), false);
        let came = wait_until(60, || {
            let now = lines(out);
            low = low.min(now);
            ended = child.try_wait().is_ok_and(|status| status.is_some());
            ended || now >= low + steps
        });
        if !came || ended {
            let _ = child.kill();
            let output = child.wait_with_output().expect("it ends");
            panic!("{case}: it ended by itself or stood still: {:?} {}", output.status, shown(&output));
        }
    }
    std::thread::sleep(delay);
    child.kill().expect("it runs");
    let output = child.wait_with_output().expect("it ends");
    assert_eq!(output.status.code(), None, "{case}: it ended by itself: {}", shown(&output));
}

//! Broken settings of [offload], [select], [host] and `device.link`.

use crate::hostile::bench::{Row, TRAIN, check, file};

#[test]
fn of_the_offload() {
    check(&[
        Row::works("as it is", TRAIN, &["run folder: new"], |place| place.run("offload.kind = \"zenflow\"")),
        file("unknown kind", "[offload]\nkind = \"zenflo\"", &["run.toml:3:8", "zenflo", "zenflow"]),
        file("unknown key", "[offload]\nkind = \"zenflow\"\nintervall = 4", &["run.toml:4:1", "intervall"]),
        file("a key of another kind", "[offload]\nkind = \"host\"\nwarmup = 4", &["run.toml:4:1", "warmup"]),
        file(
            "S = 0",
            "[offload]\nkind = \"zenflow\"\nupdate_interval = 0",
            &["run.toml:4:1", "update_interval", "at least 1"],
        ),
        file("S < 0", "[offload]\nkind = \"zenflow\"\nupdate_interval = -4", &["run.toml:4:19", "update_interval"]),
        file(
            "S a word",
            "[offload]\nkind = \"zenflow\"\nupdate_interval = \"fast\"",
            &["run.toml:4:19", "\"auto\"", "replay"],
        ),
        file(
            "R no multiple of S",
            "offload.kind = \"zenflow\"\nselect.every = 6",
            &["`select.every` = 6", "`offload.update_interval` = 4"],
        ),
        file(
            "automatic S in exact mode",
            "run.exact = true\nrun.micro_batch = 2\noffload.kind = \"zenflow\"\noffload.update_interval = \"auto\"",
            &["offload.update_interval", "exact mode", "replay"],
        ),
        file(
            "automatic R in exact mode",
            "run.exact = true\noffload.kind = \"zenflow\"\nselect.every = \"auto\"",
            &["select.every", "exact mode"],
        ),
        file(
            "replay of what is missing",
            "[offload]\nkind = \"zenflow\"\nupdate_interval = { replay = \"no.jsonl\" }",
            &["run.toml:4:1", "no.jsonl", "No such file"],
        ),
        Row::new("replay of what is garbled", TRAIN, &["run.toml:4:1", "line 2", "expected a decision"], |place| {
            place.write("d.jsonl", "{\"update\":0,\"interval\":2,\"choose\":true}\n{\"upd");
            place.run("[offload]\nkind = \"zenflow\"\nupdate_interval = { replay = \"d.jsonl\" }");
        }),
        Row::new("replay that begins late", TRAIN, &["offload.update_interval", "begin with update 0"], |place| {
            place.write("d.jsonl", "{\"update\":4,\"interval\":2,\"choose\":true}\n");
            place.run("[offload]\nkind = \"zenflow\"\nupdate_interval = { replay = \"d.jsonl\" }");
        }),
        Row::new("replay within a window", TRAIN, &["offload.update_interval", "within a window of 4"], |place| {
            place.write(
                "d.jsonl",
                "{\"update\":0,\"interval\":4,\"choose\":true}\n{\"update\":6,\"interval\":2,\"choose\":true}\n",
            );
            place.run("[offload]\nkind = \"zenflow\"\nupdate_interval = { replay = \"d.jsonl\" }");
        }),
        file(
            "buffer too small",
            "[offload]\nkind = \"host\"\nbuffer = \"8B\"",
            &["run.toml:4:1", "buffer", "at least 64"],
        ),
        file(
            "one buffer",
            "[offload]\nkind = \"zenflow\"\nbuffers = 1",
            &["run.toml:4:1", "buffers", "from 2 to 1024"],
        ),
        file("unknown tier", "[offload]\nkind = \"host\"\ntier = \"tape\"", &["run.toml:4:8", "tape", "file"]),
        file(
            "a rule that needs whole tensors",
            "optim = { kind = \"muon\", lr = 0.01 }\noffload.kind = \"zenflow\"",
            &["offload", "whole tensors", "adamw"],
        ),
        file(
            "a rule that needs norms",
            "optim = { kind = \"lamb\", lr = 0.01 }\noffload.kind = \"host\"",
            &["offload", "whole tensors", "adamw"],
        ),
    ]);
}

#[test]
fn of_the_selection() {
    check(&[
        file("without an offload", "[select]\nkind = \"topk\"", &["run.toml:2:1", "has no effect", "zenflow"]),
        file(
            "with ZeRO-Offload",
            "offload.kind = \"host\"\nselect.kind = \"topk\"",
            &["run.toml:3:1", "has no effect"],
        ),
        file("unknown kind", "offload.kind = \"zenflow\"\nselect.kind = \"best\"", &["run.toml:3:15", "best", "topk"]),
        file("no ratio", "offload.kind = \"zenflow\"\nselect.ratio = 0", &["run.toml:3:1", "ratio"]),
        file("more than all", "offload.kind = \"zenflow\"\nselect.ratio = 1.5", &["run.toml:3:1", "ratio", "1.5"]),
        file("no number", "offload.kind = \"zenflow\"\nselect.ratio = nan", &["run.toml:3:", "ratio"]),
        file("never", "offload.kind = \"zenflow\"\nselect.every = 0", &["run.toml:3:", "every"]),
        file("unknown score", "offload.kind = \"zenflow\"\nselect.score = \"l3\"", &["run.toml:3:", "l3", "l1"]),
        file(
            "unknown axis",
            "offload.kind = \"zenflow\"\nselect.axis = \"depth\"",
            &["run.toml:3:15", "depth", "input"],
        ),
    ]);
}

#[test]
fn of_the_host_and_the_link() {
    check(&[
        // They describe the machine, which the cases of a sweep share.
        Row::works("machine without an offload", TRAIN, &["run folder: new"], |place| {
            place.run("host.threads = 2\ndevice.link = { kind = \"direct\" }");
        }),
        file(
            "no threads",
            "offload.kind = \"host\"\nhost.threads = 0",
            &["run.toml:3:", "host.threads", "from 1 to 1024"],
        ),
        file("no cores", "offload.kind = \"host\"\nhost.cores = []", &["run.toml:3:", "host.cores", "names no core"]),
        file("cores that do not exist", "offload.kind = \"host\"\nhost.cores = [99999]", &["99999", "core"]),
        file(
            "a host that stands still",
            "offload.kind = \"host\"\nhost.bandwidth = \"0GB/s\"",
            &["run.toml:3:", "bandwidth"],
        ),
        file(
            "a link that stands still",
            "offload.kind = \"host\"\ndevice.link = { kind = \"emulated\", bandwidth = \"0GB/s\" }",
            &["run.toml:3:", "bandwidth"],
        ),
        file(
            "unknown link",
            "offload.kind = \"host\"\ndevice.link = { kind = \"rope\" }",
            &["run.toml:3:", "device.link", "rope"],
        ),
    ]);
}

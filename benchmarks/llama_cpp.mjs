// llama.cpp by node-llama-cpp: answers prompts greedily, for benchmarks/beside_llama_cpp.py.
// Reads a JSON object {"tokens": [...], "limit": n} per line, writes {"tokens": [...], "first": s, "seconds": s}.
// node llama_cpp.mjs MODEL.gguf THREADS, in a folder where `npm install node-llama-cpp` was run.
import {createInterface} from "node:readline";
import {getLlama} from "node-llama-cpp";

const [path, threads] = process.argv.slice(2);
const llama = await getLlama({gpu: false, maxThreads: Number(threads), build: "never", logLevel: "error"});
const model = await llama.loadModel({modelPath: path});
const context = await model.createContext({threads: Number(threads), contextSize: 2048});
const sequence = context.getSequence();
console.log(JSON.stringify({ready: true, release: llama.llamaCppRelease?.release ?? ""}));
for await (const line of createInterface({input: process.stdin})) {
    const {tokens, limit} = JSON.parse(line);
    await sequence.clearHistory();
    const started = performance.now(), answer = [];
    let first = 0;
    for await (const token of sequence.evaluate(tokens, {temperature: 0})) {
        first ||= performance.now() - started;
        answer.push(token);
        if (model.isEogToken(token) || answer.length >= limit)
            break;
    }
    const seconds = (performance.now() - started) / 1000;
    console.log(JSON.stringify({tokens: answer, first: first / 1000, seconds}));
}

// Judges what a test gives on stdin: {"expected": …, "outputs": …, "allowed": …, "unusable": …}.
// Tensors are {type, dims, hex}. Prints the verdict.
const { judge } = await import(process.argv[2]);
const { fromBytes } = await import(process.argv[3]);

let text = '';
for await (const chunk of process.stdin) text += chunk;
const said = JSON.parse(text).map(({ expected, outputs, allowed, unusable }) => {
  const tensors = (of) =>
    Object.fromEntries(
      Object.entries(of).map(([name, { type, dims, hex }]) => [
        name, fromBytes(type, dims, Uint8Array.from(Buffer.from(hex, 'hex'))),
      ]),
    );
  return judge(tensors(expected), tensors(outputs), { allowed, unusable });
});
console.log(JSON.stringify(said));

export function RequestsPage() {
  return <div class="head"><h1>Requests</h1></div>;
}
